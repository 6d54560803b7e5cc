import pytest
from late_imports import LateModule
from transformers_toys import TOKENS, estimate

from hf_memopt.estimate import MemoryEstimate

huggingface = LateModule("hf_memopt.jobs.huggingface")


@pytest.mark.slow
def test_accumulation_is_simulated_with_two_micro_batches(qwen3: str, plain: MemoryEstimate) -> None:
    workload = huggingface.HuggingFaceModel(qwen3, seq_len=TOKENS, effective_batch=8)
    assert workload.simulated({"activations": "kept"}, micro_batch=1).num_micro_batches == 2
    accumulated = estimate(qwen3, num_micro_batches=2, precision="bf16")
    assert accumulated.phases["forward"] == plain.phases["forward"] + plain.breakdown["parameters"]
