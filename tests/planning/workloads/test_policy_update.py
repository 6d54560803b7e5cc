"""lerobot's update on fake tensors: bytes of a real one, and the weights that have no gradient in either."""

import gc
from pathlib import Path
from typing import Any

import accelerators
import pytest
import torch
from counted_allocator import CountedAllocator
from late_imports import LateModule

from hf_memopt.planning import Job, MemoryEstimate, SimulatedStep, estimate_peak_memory

pytestmark = [pytest.mark.usefixtures("on_the_cpu")]

policy_toys = LateModule("policy_toys")
policy_update = LateModule("hf_memopt.planning.workloads.policy_update")
workloads = LateModule("hf_memopt.planning.workloads.of_job")

# Both count live storages of the same program to the byte; only an operation's internal memory may differ.
TOLERANCE = 0.001
LORA = {"lora_rank": 4}
ALL_LINEAR = {**LORA, "lora_targets": "all-linear"}
EXPERT = {"set": ["policy.train_expert_only=true"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "smolvla": ("smolvla", {}),
    "smolvla, all trained": (
        "smolvla",
        {"set": ["policy.train_expert_only=false", "policy.freeze_vision_encoder=false"]},
    ),
    "smolvla, state_proj frozen": ("smolvla", {"set": ["policy.train_state_proj=false"]}),
    "smolvla, LoRA": ("smolvla", LORA),
    "smolvla, LoRA of all layers": ("smolvla", ALL_LINEAR),
    "pi0": ("pi0", {}),
    "pi0, checkpointed": ("pi0", {"checkpointing": "full"}),
    "pi0, expert": ("pi0", EXPERT),
    "pi05": ("pi05", {}),
    "pi05, checkpointed": ("pi05", {"checkpointing": "full"}),
    "pi05, vision frozen": ("pi05", {"freeze_vision_tower": True}),
    "pi05, expert": ("pi05", EXPERT),
    "pi05, LoRA": ("pi05", LORA),
    "pi05, LoRA of all layers, checkpointed": ("pi05", {**ALL_LINEAR, "checkpointing": "full"}),
    "act": ("act", {}),
    "diffusion": ("diffusion", {}),
    "diffusion, checkpointed": ("diffusion", {"checkpointing": "full"}),
}


def given_step(folder: Path, kind: str, vlm: Path, **said: Any) -> SimulatedStep:
    spec = Job(str(policy_toys.write_policy(folder, kind, vlm)), batch_size=4, **said)
    return workloads.given_step(spec, workloads.workload_of(spec))[0]


def real_peak_bytes(simulated: SimulatedStep) -> tuple[int, set[str]]:
    """Return the most that live storages hold in a real run, and the trained weights that no gradient reaches."""
    torch.manual_seed(0)
    allocator = CountedAllocator()
    with allocator:
        run = simulated.setup(torch.device("cpu"))
    allocator.charge((*run.model.parameters(), *run.model.buffers()))
    gc.collect()
    allocator.reset_peaks()
    reached: set[str] = set()
    names = {parameter: name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    for parameter, name in names.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))
    with allocator:
        for _ in range(simulated.num_steps):
            simulated.step(run)
    accelerators.forget_accelerator()
    return allocator.peak_bytes, set(names.values()) - reached


@pytest.mark.e2e
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sweep(share=0.15)
def test_the_peak_is_that_of_a_real_update(case: str, toy_vlm: Path, tmp_path: Path) -> None:
    kind, said = CASES[case]
    with policy_toys.toy_size(kind, toy_vlm):
        simulated = given_step(tmp_path, kind, toy_vlm, **said)
        estimate: MemoryEstimate = estimate_peak_memory(simulated.setup, simulated.step, like="cpu")
        peak_bytes, unreached = real_peak_bytes(simulated)
    assert abs(estimate.peak_bytes / peak_bytes - 1) < TOLERANCE
    # lerobot leaves them in the optimizer, where they have neither gradient nor state.
    assert set(estimate.unreached) == unreached
