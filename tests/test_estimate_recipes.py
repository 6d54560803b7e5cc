"""Every recipe's update, estimated and really run on the CPU: both hold the same at their peaks."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from counted_allocator import CountedAllocator
from hf_memopt.recipes import causal_lm_plan, fluxflow_plan, lgt_plan, neural_operator_plan
from hf_memopt.recipes.causal_lm_data import make_tokenizer, read_texts
from hf_memopt.recipes.causal_lm_options import Options as CausalLMOptions
from hf_memopt.recipes.causal_lm_options import read_flags
from hf_memopt.recipes.fluxflow_options import Options as FluxFlowOptions
from hf_memopt.recipes.neural_operator_options import Options as NeuralOperatorOptions
from hf_memopt.recipes.planned import RecipeWorkload
from lgt_toys import tiny

from hf_memopt.planning import SimulatedStep, estimate_peak_memory

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also on a machine with a GPU, and with nothing left over from other tests or for them."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    _forget_accelerator()
    yield
    _forget_accelerator()


def _forget_accelerator() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def causal_lm(*flags: str) -> RecipeWorkload:
    shape = "hidden_size=32,intermediate_size=64,num_hidden_layers=3,num_attention_heads=2,num_key_value_heads=1"
    options = CausalLMOptions(
        *read_flags(
            CausalLMOptions.__annotations__.values(),
            "",
            [
                f"--text_file={ROOT / 'LICENSE'}",
                "--vocab_size=300",
                f"--config_overrides={shape},head_dim=16,max_position_embeddings=128,tie_word_embeddings=true",
                *flags,
            ],
        )
    )
    return causal_lm_plan.CausalLM(options, make_tokenizer(options.model, read_texts(options.data)))


def fluxflow(*flags: str) -> RecipeWorkload:
    small = ["--channels", "8", "16", "--discriminator_channels=8", "--discriminator_layers=2", "--resolution=32"]
    given = [*small, "--lpips_weights=random", *flags]
    return fluxflow_plan.FluxFlow(FluxFlowOptions(*read_flags(FluxFlowOptions.__annotations__.values(), "", given)))


def lgt(**values: Any) -> RecipeWorkload:
    return lgt_plan.LatentTransferWorkload(tiny(**values))


def neural_operator(*flags: str) -> RecipeWorkload:
    given = ["--modes=6", "--hidden_channels=8", "--batch_size=8", *flags]
    options = NeuralOperatorOptions(*read_flags(NeuralOperatorOptions.__annotations__.values(), "", given))
    return neural_operator_plan.NeuralOperator(options)


def real_peak_bytes(simulated: SimulatedStep) -> int:
    """The most that live storages hold, to the byte, while the steps really run."""
    _forget_accelerator()
    torch.manual_seed(0)
    allocator = CountedAllocator()
    with allocator:
        state = simulated.setup(torch.device("cpu"))
    gc.collect()
    allocator.reset_peaks()
    with allocator:
        for _ in range(simulated.num_steps):
            simulated.step(state)
    return allocator.peak_bytes


def deviation(workload: RecipeWorkload, micro_batch: int, **settings: str) -> float:
    """How far the estimate is above (or, negative, below) the real peak, as a share of it."""
    chosen = {lever.name: lever.values[0] for lever in workload.levers} | settings
    simulated = workload.simulated(chosen, micro_batch)
    _forget_accelerator()
    estimate = estimate_peak_memory(simulated.setup, simulated.step, like="cpu", num_steps=simulated.num_steps)
    real = real_peak_bytes(simulated)
    print(
        f"{workload.name} {chosen} {micro_batch}: {estimate.peak_bytes} {real} {estimate.phase} {estimate.confidence}"
    )
    return estimate.peak_bytes / real - 1


Make = Callable[[], RecipeWorkload]
KEPT = {"activations": "kept"}
CHECKPOINTED = {"activations": "checkpointed"}
CASES: dict[str, tuple[Make, int, dict[str, str]]] = {
    "causal_lm": (causal_lm, 8, KEPT),
    "causal_lm, checkpointed": (causal_lm, 8, CHECKPOINTED),
    "causal_lm, accumulating": (lambda: causal_lm("--gradient_accumulation_steps=2"), 2, KEPT),
    "fluxflow": (fluxflow, 4, KEPT),
    "fluxflow, checkpointed": (fluxflow, 4, CHECKPOINTED),
    "fluxflow, accumulating": (fluxflow, 2, KEPT),
    "lgt": (lgt, 8, KEPT),
    "lgt, checkpointed": (lgt, 8, CHECKPOINTED),
    "lgt, accumulating": (lgt, 2, KEPT),
    "neural_operator": (neural_operator, 8, KEPT),
    "neural_operator, checkpointed": (neural_operator, 8, {"activations": "all checkpointed"}),
    "neural_operator, accumulating": (neural_operator, 4, KEPT),
    "tfno": (lambda: neural_operator("--model=tfno"), 8, KEPT),
    "uno": (lambda: neural_operator("--model=uno"), 8, KEPT),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_peak_is_that_of_a_real_run(case: tuple[Make, int, dict[str, str]]) -> None:
    make, micro_batch, settings = case
    assert abs(deviation(make(), micro_batch, **settings)) < 0.01
