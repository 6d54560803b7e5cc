from typing import Any

import pytest
from transformers_toys import TOKENS, options_of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8' is unknown; choose from no, bf16, fp16"),
        ({"optimizer": "lion"}, "optimizer='lion' is unknown"),
        ({"seq_len": 0}, "seq_len=0 must be at least 1"),
        ({"seq_len": 10**6}, "longer than the model's max_position_embeddings"),
        ({"loss": "half"}, "loss='half' is unknown; choose from full, chunked"),
        (
            {"loss": "chunked", "task": "sequence-classification"},
            "loss='chunked' is for task='causal', not 'sequence-classification'",
        ),
        ({"quantize": "nf4"}, "quantize='nf4': for adapters; give lora_rank, such as lora_rank=16"),
        ({"use_dora": True, "lora_targets": "v_proj"}, "lora_targets='v_proj' and use_dora=True: for adapters"),
        ({"base": "disk", "lora_rank": 2}, "base='disk' is unknown; choose from off, host, file"),
        ({"base": "host"}, "base='host': weights that train do not stream; give a lora_rank"),
        ({"base": "file", "lora_rank": 2, "num_gpus": 2}, "base='file' with num_gpus=2 and engine='ddp' is not"),
        ({"base": "host", "lora_rank": 2, "base_budget": "much"}, "base_budget='much' is not a size"),
        ({"trained": True}, "trained=True needs a home for the weights; give base='host' or base='file'"),
        (
            {"trained": True, "base": "host", "num_gpus": 2},
            "trained=True with num_gpus=2 and engine='ddp': .* use one GPU and engine='ddp'",
        ),
        ({"trained": True, "base": "host", "engine": "zero3", "precision": "bf16"}, "trained=True with .*'zero3': "),
        (
            {"trained": True, "base": "host", "optimizer": "paged-adamw-8bit"},
            "optimizer='paged-adamw-8bit' with trained=True is not simulated; use another optimizer",
        ),
        ({"offload": "all", "engine": "fsdp2"}, "offload='all' with engine='fsdp2' is not simulated; use offload="),
        ({"task": "masked"}, "no class of model_type='qwen3' for task='masked'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str, qwen3: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = options_of(qwen3, **{"seq_len": TOKENS, **options}).kind


def test_a_pass_divides_the_share_of_each_gpu(qwen3: str) -> None:
    from hf_memopt.planning.models.model_options import ModelOptions

    with pytest.raises(ValueError, match="micro_batch=4 must be a divisor of effective_batch=24 // num_gpus=4"):
        ModelOptions(qwen3, micro_batch=4, effective_batch=24, num_gpus=4, seq_len=TOKENS)
