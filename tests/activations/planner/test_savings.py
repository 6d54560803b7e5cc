"""Tests of estimate_offloading_memory_savings with figures computed by hand."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_memopt.activations.planner.savings import estimate_offloading_memory_savings


def test_half_of_8000_mb() -> None:
    assert estimate_offloading_memory_savings(activation_memory_gpu_mb=8000, offload_ratio=0.5) == {
        "gpu_memory_mb": 4000,
        "gpu_savings_mb": 4000,
        "cpu_usage_mb": 4000,
        "savings_percent": 50,
    }


def test_transfer_time_of_100_mb_over_pcie_4() -> None:
    """Check 100 MiB, 104,857,600 bytes, at 32 * 10**9 bytes/s: 3.2768 ms, and 3.125 ms for 10**8 bytes."""
    mib = estimate_offloading_memory_savings(100, 1.0, link_gb_per_s=32)
    assert mib["transfer_ms"] == pytest.approx(3.2768, rel=1e-12)
    assert "hidden_ms" not in mib
    decimal = estimate_offloading_memory_savings(10**8 / 2**20, 1.0, link_gb_per_s=32)
    assert decimal["transfer_ms"] == pytest.approx(3.125, rel=1e-12)


@pytest.mark.parametrize(
    ("compute_ms", "hidden_ms", "exposed_ms", "slowdown_percent"),
    [
        # 1000 * 2**20 bytes at 1.048576 * 10**9 bytes/s take 1000 ms each way; backward computes for 2 * compute_ms.
        (1000, 2000, 0, 0),  # the forward pass just covers its copies
        (600, 600 + 1000, 400, 100 * 400 / 1800),  # backward still covers its copies
        (200, 200 + 400, 800 + 600, 100 * 1400 / 600),
    ],
)
def test_what_compute_hides(compute_ms: float, hidden_ms: float, exposed_ms: float, slowdown_percent: float) -> None:
    savings = estimate_offloading_memory_savings(1000, 1.0, link_gb_per_s=1.048576, compute_ms=compute_ms)
    assert savings["transfer_ms"] == pytest.approx(1000)
    assert savings["hidden_ms"] == pytest.approx(hidden_ms)
    assert savings["exposed_ms"] == pytest.approx(exposed_ms)
    assert savings["slowdown_percent"] == pytest.approx(slowdown_percent)


@given(st.floats(0, 1e6), st.floats(0, 1), st.floats(0.1, 1e3), st.floats(0.1, 1e6))
def test_sums(activation_mb: float, ratio: float, link: float, compute_ms: float) -> None:
    savings = estimate_offloading_memory_savings(activation_mb, ratio, link_gb_per_s=link, compute_ms=compute_ms)
    assert math.isclose(savings["gpu_memory_mb"] + savings["gpu_savings_mb"], activation_mb, abs_tol=1e-9)
    assert math.isclose(savings["hidden_ms"] + savings["exposed_ms"], 2 * savings["transfer_ms"], abs_tol=1e-9)
    assert min(savings.values()) >= 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"offload_ratio": 1.5}, r"offload_ratio=1.5 must be at most 1"),
        ({"link_gb_per_s": 0}, r"link_gb_per_s=0 must be above 0"),
        ({"compute_ms": 5}, "compute_ms=5 needs link_gb_per_s"),
    ],
)
def test_bad_input(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        estimate_offloading_memory_savings(**{"activation_memory_gpu_mb": 8000, "offload_ratio": 0.5, **options})
