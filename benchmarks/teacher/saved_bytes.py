"""Bytes that one SmolVLA training step saves for backward: lerobot's joint forward against the shared prefix.

    python -m benchmarks.teacher.saved_bytes

SmolVLA has its published size and random weights (5 GiB of host memory, some minutes on two CPU cores). Each forward
and backward runs once in float32, and the distinct storages that autograd keeps are counted. Bytes do not depend on the
device, so no accelerator is needed.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import CPU, MIB, BenchmarkParser, environment, finish, print_rows
from benchmarks.teacher.smolvla import SIZES, Size, build_policy, draw_noise_and_time, make_batch, observe
from hf_memopt.lerobot.flow.flow_policy import Observation
from hf_memopt.lerobot.flow.smolvla_flow import SmolVLAExpert, SmolVLAPrefix
from hf_memopt.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.memory import SavedBytes
from hf_memopt.reflow import interpolate, reflow_loss

# Upper limits of saved bytes, shared prefix over joint forward, at the published size. With a trained state projection
# 0.40 allows a copy of the prefix in every layer, to append the state token; 0.33 allows none.
TARGET_RATIOS = {"frozen": [0.31], "trained": [0.40, 0.33]}

Gradients = dict[str, Tensor]
Losses = Callable[[SmolVLAReflowPolicy, Observation, Tensor, Tensor, Tensor], Tensor]


def joint_losses(
    policy: SmolVLAReflowPolicy, observation: Observation, target: Tensor, noise: Tensor, time: Tensor
) -> Tensor:
    """Return the losses `(batch,)` of lerobot's forward: prefix and actions pass VLM and expert together."""
    squared: Tensor = policy.model.forward(*observation.arguments(), target, noise, time)
    return squared[..., : policy.config.action_feature.shape[0]].mean(dim=(1, 2))


def shared_losses(
    policy: SmolVLAReflowPolicy, observation: Observation, target: Tensor, noise: Tensor, time: Tensor
) -> Tensor:
    """Return the losses `(batch,)` with the prefix computed first, without a graph."""
    prefix = SmolVLAPrefix(policy.model, observation)
    velocity = SmolVLAExpert(policy.model, prefix).velocity(interpolate(noise, target, time), time)
    return reflow_loss(velocity, noise, target, policy.config.action_feature.shape[0])


def measure(policy: SmolVLAReflowPolicy, losses: Losses, size: Size, batch_size: int) -> tuple[int, float, Gradients]:
    observation = observe(policy, make_batch(size, batch_size, CPU))
    noise, time = draw_noise_and_time(policy, batch_size, CPU)
    with SavedBytes(exclude=policy.parameters()) as saved:
        loss = losses(policy, observation, noise.flip(0), noise, time).mean()
    policy.zero_grad(set_to_none=True)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return saved.total_bytes, loss.item(), gradients


def compare(policy: SmolVLAReflowPolicy, size: Size, batch_size: int) -> dict[str, Any]:
    joint_bytes, joint_loss, joint_gradients = measure(policy, joint_losses, size, batch_size)
    shared_bytes, shared_loss, shared_gradients = measure(policy, shared_losses, size, batch_size)
    if joint_gradients.keys() != shared_gradients.keys():
        different = sorted(joint_gradients.keys() ^ shared_gradients.keys())
        raise RuntimeError(f"only one of the two forwards gave these a gradient: {', '.join(different)}")
    return {
        "joint_bytes": joint_bytes,
        "shared_bytes": shared_bytes,
        "ratio": shared_bytes / joint_bytes,
        "loss_difference": abs(shared_loss - joint_loss),
        "max_relative_gradient_difference": max(
            _relative_difference(joint_gradients[name], shared_gradients[name]) for name in joint_gradients
        ),
    }


def _relative_difference(expected: Tensor, actual: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))


def run(size_name: str, batch_size: int, folder: Path) -> dict[str, Any]:
    """Run the benchmark: state projection frozen, then trained (lerobot's default)."""
    size = SIZES[size_name]
    policy = build_policy(size, folder, train_state_proj=True).train()
    cases = {}
    for case in ("frozen", "trained"):
        print(f"state projection {case} ...", flush=True)
        policy.model.state_proj.requires_grad_(case == "trained")
        cases[case] = compare(policy, size, batch_size)
    return {
        **environment(CPU),
        "benchmark": "teacher.saved_bytes",
        "size": size_name,
        "batch_size": batch_size,
        "dtype": "float32",
        "num_parameters": sum(p.numel() for p in policy.parameters()),
        "target_ratios": TARGET_RATIOS,
        "state_projection": cases,
    }


def print_report(results: dict[str, Any]) -> None:
    print(
        f"counted, for SmolVLA with {results['num_parameters'] / 1e6:.0f} million parameters in {results['dtype']}, "
        f"a batch of {results['batch_size']}"
    )
    rows = [
        {
            "state projection": case,
            "joint MiB": f"{found['joint_bytes'] / MIB:.1f}",
            "shared MiB": f"{found['shared_bytes'] / MIB:.1f}",
            "ratio": f"{found['ratio']:.3f}",
            "targets": _verdicts(found["ratio"], results["target_ratios"][case]) if results["size"] == "real" else "-",
            "loss diff": f"{found['loss_difference']:.1e}",
            "max rel grad diff": f"{found['max_relative_gradient_difference']:.1e}",
        }
        for case, found in results["state_projection"].items()
    ]
    print_rows(rows)


def _verdicts(ratio: float, targets: list[float]) -> str:
    return ", ".join(f"{target:.2f} {'met' if ratio <= target else 'missed'}" for target in targets)


def main(arguments: list[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="real", help="which SmolVLA (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=2, help="samples per step (default: %(default)s)")
    options = parser.options(arguments)
    with tempfile.TemporaryDirectory() as folder:
        results = run(options.size, options.batch_size, Path(folder))
    finish(results, print_report, options.output, "saved-bytes")


if __name__ == "__main__":
    main()
