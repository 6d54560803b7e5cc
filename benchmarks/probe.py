"""Facts that every figure depends on, in well under a minute: link, page-locking, matrix products, attention.

python -m benchmarks.probe
"""

import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.activations.model import deterministic, flash_attention
from benchmarks.common import BenchmarkParser, current_device, environment, print_table, results_path, write_results
from benchmarks.timing import median_and_spread, step_times_ms

GIB = 2**30
SIZES: dict[str, dict[str, int]] = {
    "real": {"page_locked_bytes": 4 * GIB, "width": 8192, "num_tokens": 8192, "heads": 32},
    "toy": {"page_locked_bytes": 2**20, "width": 64, "num_tokens": 64, "heads": 4},
}
HEAD_DIM = 128
ATTENTION = ("flash", "fmha", "sdpa", "cudnn", "attention")


def measure(size_name: str, device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {}
    size = SIZES[size_name]
    speeds = page_locking(size["page_locked_bytes"], device) | {"half_flops": half_flops(size["width"], device)}

    def gradients() -> list[Tensor]:
        return attention_gradients(size["num_tokens"], size["heads"], device)

    with flash_attention(device):
        flash = differing(gradients)
        with deterministic():
            exact = differing(gradients)
    return {
        **speeds,
        "memory_bytes": list(torch.accelerator.get_memory_info(device)),
        "cudnn": torch.backends.cudnn.version(),
        "attention_kernels": kernels_of(gradients) if size_name == "real" else None,
        "differing_gradients": {"as torch chooses": differing(gradients), "flash": flash, "deterministic": exact},
    }


def page_locking(num_bytes: int, device: torch.device) -> dict[str, Any]:
    runtime = torch.cuda.cudart()
    pages = mmap.mmap(-1, num_bytes)
    block = torch.frombuffer(pages, dtype=torch.uint8)
    torch.accelerator.synchronize(device)
    seconds, registered = _timed(lambda: int(runtime.cudaHostRegister(block.data_ptr(), num_bytes, 0)))
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    link = {
        "to_device_gb_s": _gb_per_s(lambda: there.copy_(block, non_blocking=True), num_bytes, device),
        "to_host_gb_s": _gb_per_s(lambda: block.copy_(there, non_blocking=True), num_bytes, device),
        "both_ways_gb_s": _both_ways_gb_per_s(block, there, device),
    }
    seconds_back, unregistered = _timed(lambda: int(runtime.cudaHostUnregister(block.data_ptr())))
    return {
        "page_lock_gib_s": num_bytes / GIB / seconds,
        "page_unlock_gib_s": num_bytes / GIB / seconds_back,
        "return_codes": {"register": registered, "unregister": unregistered},
        **link,
    }


def _timed(work: Callable[[], int]) -> tuple[float, int]:
    begun = time.perf_counter()
    code = work()
    return time.perf_counter() - begun, code


def _gb_per_s(copy: Callable[[], object], num_bytes: int, device: torch.device) -> float:
    times = step_times_ms(copy, device, max_steps=3, max_seconds=10)
    return num_bytes / 1e6 / median_and_spread(times)["min"]


def _both_ways_gb_per_s(block: Tensor, there: Tensor, device: torch.device) -> float:
    half = block.numel() // 2
    streams = torch.Stream(device), torch.Stream(device)

    def copy() -> None:
        with streams[0]:
            there[:half].copy_(block[:half], non_blocking=True)
        with streams[1]:
            block[half:].copy_(there[half:], non_blocking=True)
        for stream in streams:
            stream.synchronize()

    begun = time.perf_counter()
    copy()
    return 2 * half / 1e9 / (time.perf_counter() - begun)


def half_flops(width: int, device: torch.device) -> float:
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = step_times_ms(lambda: a @ b, device, max_steps=10, max_seconds=2)
    return 2 * width**3 / (1e-3 * median_and_spread(times)["median"])


def attention_gradients(num_tokens: int, num_heads: int, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    heads = num_heads, num_heads // 4, num_heads // 4
    inputs = [torch.randn(1, count, num_tokens, HEAD_DIM, **options) for count in heads]
    output = functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    output.float().square().mean().backward()
    return [tensor.grad for tensor in inputs if tensor.grad is not None]


def differing(gradients: Callable[[], list[Tensor]], times: int = 3) -> int:
    """Return how many gradients of some repetitions differ from those of the first in a bit."""
    first = gradients()
    return sum(not torch.equal(one, other) for _ in range(times) for one, other in zip(first, gradients(), strict=True))


def kernels_of(gradients: Callable[[], list[Tensor]]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        gradients()
        torch.accelerator.synchronize()
    return sorted(
        {event.key[:80] for event in profiler.key_averages() if any(word in event.key.lower() for word in ATTENTION)}
    )


def main(arguments: list[str] | None = None) -> int:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="real", help="of buffers and matrices (default: %(default)s)")
    options = parser.options(arguments)
    device = current_device()
    found = measure(options.size, device)
    print_table(["fact", "found"], [[name, str(value)] for name, value in found.items()])
    results = {**environment(device), "benchmark": "probe", "size": options.size, "facts": found}
    print("wrote", write_results(results, options.output or results_path("probe", device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
