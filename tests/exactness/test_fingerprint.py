"""Fingerprints: every bit counts, sizes of differences are estimated, and no tensor is copied whole."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from hf_memopt.exactness import recording as fingerprint
from hf_memopt.exactness.recording import NUM_SUMS, Fingerprint, parts_of

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.sampled_from(DTYPES), st.integers(1, 40), st.randoms())
def test_any_bit_changes_the_digest(dtype: torch.dtype, number: int, random: object) -> None:
    before = (randn(number) * 8).to(dtype)
    after = before.clone()
    in_bytes = after.view(torch.uint8)
    position = random.randrange(in_bytes.numel())  # type: ignore[attr-defined]
    in_bytes[position] ^= 1 << random.randrange(8)  # type: ignore[attr-defined]
    first, second = Fingerprint.of(before), Fingerprint.of(after)
    assert first.sha256 != second.sha256
    assert Fingerprint.of(before.clone()) == first


def test_a_boolean_counts() -> None:
    assert Fingerprint.of(torch.tensor([True, False])).sha256 != Fingerprint.of(torch.tensor([True, True])).sha256


@given(st.integers(1, NUM_SUMS), st.floats(1e-6, 1e3), st.integers(0, 1000))
def test_distances_of_small_tensors_are_exact(number: int, size: float, seed: int) -> None:
    before = randn(number, seed=seed).double()
    change = size * randn(number, seed=seed + 1).double()
    first, second = Fingerprint.of(before), Fingerprint.of(before + change)
    assert first.distance(second) == pytest.approx(float(change.norm()), rel=1e-6)
    assert first.relative(second) == pytest.approx(float(change.norm() / before.norm()), rel=1e-6)
    assert first.norm == pytest.approx(float(before.norm()), rel=1e-12)


@pytest.mark.parametrize("shape", [(1000,), (300, 300), (1100, 1001)])
def test_distances_of_others_have_a_standard_error_of_five_percent(shape: tuple[int, ...]) -> None:
    errors = []
    for seed in range(12):
        before, change = randn(*shape, seed=seed), 1e-3 * randn(*shape, seed=100 + seed)
        found = Fingerprint.of(before).distance(Fingerprint.of(before + change))
        errors.append(found / float((before + change - before).double().norm()) - 1)
    deviation = math.sqrt(sum(error**2 for error in errors) / len(errors))
    assert 0.01 < deviation < 0.08
    assert abs(sum(errors) / len(errors)) < 0.05


def test_a_single_element_of_a_large_tensor_is_exact() -> None:
    before = randn(3, 2**19)
    after = before.clone()
    after[2, 77] += 1
    assert Fingerprint.of(before).distance(Fingerprint.of(after)) == pytest.approx(1, rel=1e-6)


def transposed(tensor: Tensor) -> Tensor:
    """Return the same values in memory in another order."""
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("shape", [(3, 5), (1, 700), (700, 1), (61, 50), (2, 999), (999, 2), (4, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_chunks_and_layouts_change_nothing(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = randn(*shape).to(dtype)
    monkeypatch.setattr(fingerprint, "_CHUNK", 256)
    fingerprint._signs.cache_clear()
    try:
        expected = Fingerprint.of(tensor)
        assert expected.distance(Fingerprint.of(tensor + 1)) > 0
        for other in (transposed(tensor), tensor.flip(0).flip(0), torch.stack([tensor, tensor], -1)[..., 0]):
            found = Fingerprint.of(other)
            assert (found.sha256, found.shape) == (expected.sha256, expected.shape)
            assert found.sketch == pytest.approx(expected.sketch, abs=1e-4)
            assert found.norm == pytest.approx(expected.norm)
    finally:
        fingerprint._signs.cache_clear()


def test_conjugated_and_negated_views_have_their_values() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    assert Fingerprint.of(numbers.conj()) == Fingerprint.of(numbers.conj().resolve_conj())
    assert Fingerprint.of(numbers.conj().imag) == Fingerprint.of(-numbers.imag)


def test_shape_and_dtype_are_told_apart() -> None:
    found = Fingerprint.of(torch.ones(2, 3, dtype=torch.bfloat16))
    assert (found.dtype, found.shape, found.num_elements) == ("bfloat16", (2, 3), 6)


@pytest.mark.parametrize("value", [3.5, -2.0, 0.0])
def test_a_single_value_can_be_read(value: float) -> None:
    assert Fingerprint.of(torch.tensor(value)).value == value
    assert Fingerprint.of(torch.tensor([[value]], dtype=torch.bfloat16)).value == value


def test_there_is_no_single_value_of_several_or_of_none() -> None:
    assert Fingerprint.of(torch.ones(2)).value is None
    assert Fingerprint.of(torch.tensor(math.nan)).value is None


def test_an_empty_tensor() -> None:
    empty = Fingerprint.of(torch.empty(0, 3))
    assert (empty.num_elements, empty.norm, empty.distance(empty)) == (0, 0, 0)


def test_elements_that_are_not_finite_are_counted_and_left_out() -> None:
    found = Fingerprint.of(torch.tensor([3.0, math.inf, -math.inf, math.nan, 4.0]))
    assert (found.num_not_finite, found.norm) == (3, 5)
    assert found.distance(Fingerprint.of(torch.ones(5))) == math.inf
    assert found.relative(Fingerprint.of(torch.ones(4))) == math.inf


def test_zeros_are_as_far_from_others_as_can_be() -> None:
    assert Fingerprint.of(torch.zeros(3)).relative(Fingerprint.of(torch.ones(3))) == math.inf
    assert Fingerprint.of(torch.ones(3)).relative(Fingerprint.of(torch.zeros(3))) == pytest.approx(1)
    assert Fingerprint.of(torch.zeros(3)).relative(Fingerprint.of(-torch.zeros(3))) == 0


@given(st.floats(-4, 4).filter(lambda factor: abs(factor) > 1e-3), st.integers(0, 100))
@example(0.5, 0)
def test_a_multiple_has_a_factor(factor: float, seed: int) -> None:
    tensor = randn(2000, seed=seed)
    assert Fingerprint.of(tensor).factor_to(Fingerprint.of(tensor * factor)) == pytest.approx(factor, rel=1e-4)


def test_others_have_no_factor() -> None:
    one = Fingerprint.of(randn(2000))
    for other in (randn(2000, seed=1), randn(1999), torch.full((2000,), math.nan)):
        assert one.factor_to(Fingerprint.of(other)) is None
    assert one.factor_to(Fingerprint.of(torch.zeros(2000))) == 0
    assert Fingerprint.of(torch.zeros(2000)).factor_to(one) is None
    assert Fingerprint.of(torch.ones(1)).factor_to(Fingerprint.of(torch.full((1,), 2.0))) is None


def test_the_difference_of_two_tells_a_share() -> None:
    before, share = randn(500), randn(500, seed=1)
    found = Fingerprint.of(before + share).minus(Fingerprint.of(before))
    assert found.factor_to(Fingerprint.of(share / 2)) == pytest.approx(0.5, rel=1e-4)
    assert found.norm == pytest.approx(float(share.norm()), rel=0.2)


MEASURED = """
import torch
from hf_memopt.exactness.recording import Fingerprint
from hf_memopt.memory.device_counters import peak_bytes, reset_peak
cpu = torch.device("cpu")
Fingerprint.of(torch.ones(2**21))
for make in (
    lambda: torch.ones(2**25),
    lambda: torch.ones(2**12, 2**13).t(),
    lambda: torch.ones(3, 2**24).t(),
    lambda: torch.ones(2**24, 3).t()[None],
):
    tensor = make()
    reset_peak(cpu)
    before = peak_bytes(cpu)
    Fingerprint.of(tensor)
    print("none" if before is None else peak_bytes(cpu) - before)
"""


@pytest.mark.slow
def test_a_large_tensor_is_not_copied() -> None:
    """Measure resident memory in a process of its own, where nothing else has left room."""
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    if "none" in done.stdout:
        pytest.skip("this system does not tell a process's peak")
    added = [int(line) for line in done.stdout.split()]
    assert len(added) == 4
    assert max(added) < 100 * 2**20  # of 128 MiB and more


def test_parts_of_a_plain_and_of_a_sparse_tensor() -> None:
    plain = torch.ones(2)
    assert list(parts_of(plain)) == [("", plain)]
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,))
    parts: dict[str, Tensor] = dict(parts_of(sparse))
    assert parts[".indices"].tolist() == [[1]]
    assert parts[".values"].tolist() == [5]
