"""Python time that offloaders spend on packing and unpacking a saved tensor, on the CPU.

    python -m benchmarks.activations.offload_cost

A chain of sines on a few numbers saves one tensor per operation; copies and arithmetic cost next to nothing, and
bookkeeping remains. Kinds take turns within each round, and medians over rounds are reported. The clock is the thread's
CPU time, so that other processes disturb little.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from trl.models.activation_offloading import OffloadActivations

from benchmarks.common import CPU, BenchmarkParser, environment, finish, print_table
from benchmarks.targets import Verdict
from benchmarks.timing import median_and_spread
from hf_memopt import ActivationOffloader, SyncCopier

NUM_NUMBERS = 16  # 64 bytes per saved tensor
LARGE_MB = 10.0  # the offloader's default threshold
TARGETS = {"ours, kept": 2.5, "ours, offloaded": 20.0}  # microseconds per saved tensor over the no-op hook, at most
HEADER = ["hooks", "us / tensor", "over no-op", "target"]

Hooks = Callable[[], AbstractContextManager[Any]]


def no_op() -> AbstractContextManager[Any]:
    """Return the cheapest hook. It detaches, since a tensor that is its own pack result would leak."""
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


def kinds() -> dict[str, Hooks]:
    """Return the hooks to compare; all tensors are below the threshold of `ours, kept`."""
    kept = ActivationOffloader(mode="all", offload_threshold_mb=LARGE_MB, copier=SyncCopier())
    offloaded = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier())
    return {
        "none": contextlib.nullcontext,
        "no-op": no_op,
        "ours, kept": kept.offload_context,
        "ours, offloaded": offloaded.offload_context,
        "save_on_cpu": lambda: save_on_cpu(pin_memory=True),  # copies even from the CPU
        "TRL": trl_hooks(),
    }


def trl_hooks() -> Hooks:
    """Return TRL's hooks with the CPU as their accelerator: they copy to the host, and never back."""
    with patch.object(torch.accelerator, "current_accelerator", lambda: CPU):
        hooks = OffloadActivations(use_pin_memory=False, use_streams=False, min_offload_size=0)
    return lambda: hooks


def step(x: Tensor, num_tensors: int, hooks: Hooks) -> float:
    """Return microseconds per saved tensor, forward and backward."""
    start = time.thread_time()
    with hooks():
        y = x
        for _ in range(num_tensors):
            y = y.sin()
    y.backward(torch.ones_like(y))
    return 1e6 * (time.thread_time() - start) / num_tensors


def measure(num_rounds: int, num_tensors: int) -> dict[str, Any]:
    compared = kinds()
    x = torch.full((NUM_NUMBERS,), 0.5, requires_grad=True)
    for hooks in compared.values():  # host memory is allocated and orders are learned
        for _ in range(3):
            step(x, num_tensors, hooks)
    rounds = [{name: step(x, num_tensors, hooks) for name, hooks in compared.items()} for _ in range(num_rounds)]
    return {
        name: {
            "us_per_tensor": median_and_spread([times[name] for times in rounds]),
            "us_over_no_op": statistics.median(times[name] - times["no-op"] for times in rounds),
        }
        for name in compared
    }


def print_report(results: dict[str, Any]) -> None:
    rows = []
    for name, found in results["hooks"].items():
        over, target = found["us_over_no_op"], results["targets_us_over_no_op"].get(name)
        verdict = "-" if target is None else f"{target:g} {Verdict(name, over, target).outcome}"
        rows.append([name, f"{found['us_per_tensor']['median']:.1f}", f"{over:+.1f}", verdict])
    print(
        f"{results['num_tensors']} saved tensors, medians of {results['num_rounds']} rounds, Python {results['python']}"
    )
    print_table(HEADER, rows)


def main(arguments: list[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="per kind (default: %(default)s)")
    parser.add_argument("--tensors", type=int, default=500, help="saved in one pass (default: %(default)s)")
    options = parser.options(arguments)
    torch.set_num_threads(1)
    results = {
        **environment(CPU),
        "benchmark": "activations.offload_cost",
        "num_rounds": options.rounds,
        "num_tensors": options.tensors,
        "targets_us_over_no_op": TARGETS,
        "hooks": measure(options.rounds, options.tensors),
    }
    finish(results, print_report, options.output, "offload-cost")


if __name__ == "__main__":
    main()
