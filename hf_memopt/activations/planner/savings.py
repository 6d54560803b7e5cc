"""Arithmetic for a first estimate: bytes that offloading saves, and time that the link can hide."""

from hf_memopt.ranges import NOT_NEGATIVE, POSITIVE, Range
from hf_memopt.units import MIB


def estimate_offloading_memory_savings(
    activation_memory_gpu_mb: float,
    offload_ratio: float,
    *,
    link_gb_per_s: float | None = None,
    compute_ms: float | None = None,
) -> dict[str, float]:
    """Compute the memory that offloading a share of the activations frees, and the time that its copies take.

    Physical limit: while the forward pass computes for `compute_ms`, the link carries `link_gb_per_s * compute_ms` to
    the host, and backward, which computes for twice as long, up to twice that back. Per token and layer, for b bytes
    offloaded, F floating-point operations in forward, P operations and B bytes per second, the share that can be hidden
    is `min(1, B F / (P b))` in forward and `min(1, 2 B F / (P b))` in backward. A real run hides at most this: copies
    cannot start before there is something to copy.

    Args:
        activation_memory_gpu_mb: tensors that autograd saves per step, in MiB.
        offload_ratio: share of it that goes to the host, 0 to 1.
        link_gb_per_s: bandwidth of one direction, in 10**9 bytes per second; specified for PCIe 3.0 x16 as 16, 4.0 as
            32, 5.0 as 64, measured lower.
        compute_ms: computing time of one forward pass without offloading.

    Returns:
        Always `gpu_memory_mb` (activations left on the device), `gpu_savings_mb`, `cpu_usage_mb` (host memory) and
            `savings_percent`; with `link_gb_per_s` also `transfer_ms`, for one direction; with `compute_ms` too,
            `hidden_ms` and `exposed_ms`, both directions together, and `slowdown_percent`, the exposed time as a share
            of forward and backward.

    Raises:
        ValueError: a value out of range, or `compute_ms` without `link_gb_per_s`.
    """
    NOT_NEGATIVE.check("activation_memory_gpu_mb", activation_memory_gpu_mb)
    Range(at_least=0, at_most=1).check("offload_ratio", offload_ratio)
    offloaded_mb = activation_memory_gpu_mb * offload_ratio
    savings = {
        "gpu_memory_mb": activation_memory_gpu_mb - offloaded_mb,
        "gpu_savings_mb": offloaded_mb,
        "cpu_usage_mb": offloaded_mb,
        "savings_percent": 100.0 * offload_ratio,
    }
    if link_gb_per_s is None:
        if compute_ms is not None:
            raise ValueError(f"compute_ms={compute_ms} needs link_gb_per_s, the bandwidth to compare it with")
        return savings
    POSITIVE.check("link_gb_per_s", link_gb_per_s)
    transfer_ms = offloaded_mb * MIB / (link_gb_per_s * 1e9) * 1e3
    savings["transfer_ms"] = transfer_ms
    if compute_ms is None:
        return savings
    POSITIVE.check("compute_ms", compute_ms)
    backward_ms = 2 * compute_ms
    hidden_ms = min(transfer_ms, compute_ms) + min(transfer_ms, backward_ms)
    exposed_ms = 2 * transfer_ms - hidden_ms
    return savings | {
        "hidden_ms": hidden_ms,
        "exposed_ms": exposed_ms,
        "slowdown_percent": 100.0 * exposed_ms / (compute_ms + backward_ms),
    }
