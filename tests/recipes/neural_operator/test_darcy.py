import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_imports import LateModule
from torch import Tensor

from hf_memopt.recipes.neural_operator import darcy
from hf_memopt.recipes.neural_operator.darcy import HIGH, LOW, Darcy, cached_folder, generate, samples

datasets_darcy = LateModule("neuralop.data.datasets.darcy")


CPU = torch.device("cpu")
TRAIN = Darcy("train", 16, 12)


def coefficients_of(nodes: int, num_samples: int = 3, contrast: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(nodes)
    noise = torch.randn(num_samples, nodes, nodes, generator=generator, dtype=torch.float64)
    return torch.where(darcy.random_fields(noise, 2.0, 3.0) >= 0, contrast, 1.0).to(torch.float64)


def ones_inside(coefficients: Tensor) -> Tensor:
    return torch.ones_like(coefficients[:, 1:-1, 1:-1])


def solve_directly(coefficients: Tensor, source: Tensor) -> Tensor:
    """Solve by scipy, which shares no code with `darcy.solve`."""
    import numpy as np
    import scipy.sparse as sparse
    from scipy.sparse.linalg import splu

    nodes = coefficients.shape[-1]
    numbers = np.arange(nodes**2).reshape(nodes, nodes)
    inner = numbers[1:-1, 1:-1].ravel()
    solutions = np.zeros((len(coefficients), nodes**2))
    for solution, a, f in zip(solutions, coefficients.cpu().numpy(), source.cpu().numpy(), strict=True):
        matrix = sparse.csr_array((nodes**2, nodes**2))
        for first, second in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
            i, j = first.ravel(), second.ravel()
            flux = (nodes - 1) ** 2 * 0.5 * (a.ravel()[i] + a.ravel()[j])
            entries = np.concatenate((flux, flux, -flux, -flux))
            rows, columns = np.concatenate((i, j, i, j)), np.concatenate((i, j, j, i))
            matrix = matrix + sparse.coo_array((entries, (rows, columns)), shape=matrix.shape).tocsr()
        solution[inner] = splu(matrix[inner][:, inner].tocsc()).solve(f.ravel())
    return torch.from_numpy(solutions.reshape(-1, nodes, nodes))


# ---------------------------------------------------------------------------------------------------------- solver


def error_of_exact_solution(nodes: int) -> float:
    """Return the largest error for a = 1 + x y / 2 and u = sin(pi x) sin(2 pi y)."""
    x = torch.linspace(0, 1, nodes, dtype=torch.float64)[:, None]
    y = x.T
    sin_x, cos_x = torch.sin(torch.pi * x), torch.cos(torch.pi * x)
    sin_y, cos_y = torch.sin(2 * torch.pi * y), torch.cos(2 * torch.pi * y)
    coefficient = 1 + x * y / 2
    gradients = y / 2 * torch.pi * cos_x * sin_y + x / 2 * 2 * torch.pi * sin_x * cos_y
    source = 5 * torch.pi**2 * coefficient * sin_x * sin_y - gradients
    found = darcy.solve(coefficient[None], source[None, 1:-1, 1:-1], tolerance=1e-11)
    return float((found[0] - sin_x * sin_y).abs().max())


def test_error_falls_with_the_square_of_the_spacing() -> None:
    errors = [error_of_exact_solution(nodes) for nodes in (9, 17, 33, 65)]
    orders = [math.log2(coarse / fine) for coarse, fine in itertools.pairwise(errors)]
    assert orders == pytest.approx([2, 2, 2], abs=0.1)
    assert errors[-1] < 1e-3


def test_poissons_equation_has_its_series_value_at_the_centre() -> None:
    coefficients = torch.ones(1, 129, 129, dtype=torch.float64)
    centre = darcy.solve(coefficients, ones_inside(coefficients))[0, 64, 64].item()
    odd = range(1, 200, 2)
    terms = [(-1) ** ((m + n) // 2 - 1) / (m * n * (m * m + n * n)) for m in odd for n in odd]
    assert centre == pytest.approx(16 / math.pi**4 * sum(terms), rel=1e-4)


@pytest.mark.parametrize("nodes", [3, 4, 16, 33])
def test_iterative_and_direct_solver_agree(nodes: int) -> None:
    coefficients = coefficients_of(nodes)
    source = torch.rand(3, nodes - 2, nodes - 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    iterative, direct = darcy.solve(coefficients, source), solve_directly(coefficients, source)
    assert (iterative - direct).abs().max() <= 1e-8 * direct.abs().max()
    for solutions in (iterative, direct):
        assert darcy.relative_residual(coefficients, solutions, source).max() <= 1e-8
        assert solutions[:, [0, -1]].abs().max() == solutions[:, :, [0, -1]].abs().max() == 0


@settings(max_examples=20, deadline=None)
@given(nodes=st.integers(3, 40), contrast=st.floats(1, 100), tolerance=st.sampled_from([1e-3, 1e-6, 1e-10]))
def test_the_tolerance_is_kept(nodes: int, contrast: float, tolerance: float) -> None:
    coefficients = coefficients_of(nodes, contrast=contrast)
    source = ones_inside(coefficients)
    solutions = darcy.solve(coefficients, source, tolerance)
    assert darcy.relative_residual(coefficients, solutions, source).max() <= tolerance


def test_the_operator_is_symmetric_and_positive() -> None:
    apply = darcy.operator(coefficients_of(12))
    u, v = (torch.randn(3, 10, 10, dtype=torch.float64) for _ in range(2))
    products = (apply(u) * v).sum(dim=(1, 2)), (u * apply(v)).sum(dim=(1, 2))
    torch.testing.assert_close(*products)
    assert (apply(u) * u).sum(dim=(1, 2)).min() > 0


def test_what_cannot_be_reached_is_refused() -> None:
    coefficients = coefficients_of(16, contrast=4.0).float()
    with pytest.raises(RuntimeError, match=r"tolerance=1e-12 was not reached: .* beyond torch\.float32"):
        darcy.solve(coefficients, ones_inside(coefficients), tolerance=1e-12)


def test_a_sample_that_is_solved_at_once_waits_for_the_others() -> None:
    coefficients = coefficients_of(16, num_samples=2)
    source = ones_inside(coefficients)
    source[0] = 0
    nothing, something = darcy.solve(coefficients, source)
    assert nothing.abs().max() == 0
    torch.testing.assert_close(something[None], solve_directly(coefficients[1:], source[1:]), rtol=1e-7, atol=0)


def test_a_solution_that_breaks_down_is_refused() -> None:
    coefficients = coefficients_of(16)
    coefficients[0, 5, 5] = math.nan
    with pytest.raises(RuntimeError, match="a relative residual is nan"):
        darcy.solve(coefficients, ones_inside(coefficients))


# --------------------------------------------------------------------------------------------------------- samples


def test_random_fields_have_the_stated_covariance() -> None:
    """Compare variances of the first cosine coefficients over many fields, within six standard deviations."""
    num_samples, nodes, alpha, tau = 4000, 8, 2.0, 3.0
    noise = torch.randn(num_samples, nodes, nodes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fields = darcy.random_fields(noise, alpha, tau)
    wave = torch.arange(nodes, dtype=torch.float64)
    cosines = torch.cos(torch.pi / nodes * torch.outer(wave + 0.5, wave))
    cosines /= cosines.norm(dim=0)
    found = (cosines.T @ fields @ cosines / nodes).var(dim=0)
    square = torch.pi**2 * (wave[:, None] ** 2 + wave**2)
    expected = tau ** (2 * alpha - 2) * (square + tau**2) ** -alpha
    expected[0, 0] = 0
    torch.testing.assert_close(found, expected, rtol=6 * (2 / num_samples) ** 0.5, atol=1e-20)


def test_samples_depend_on_the_seed_and_the_split_and_not_on_the_batch_size() -> None:
    def drawn(batch_size: int, **changes: object) -> Tensor:
        parameters = {"split": "train", "resolution": 16, "num_samples": 7, **changes}
        return torch.cat([coefficients for coefficients, _ in samples(Darcy(**parameters), CPU, batch_size)])

    reference = drawn(7)
    assert torch.equal(drawn(2), reference)
    assert torch.equal(drawn(3, num_samples=5), reference[:5])
    others = [drawn(7, seed=1), drawn(7, split="test"), drawn(7, seed=1, split="test")]
    assert not any(torch.equal(a, b) for a in others for b in (reference, *others) if a is not b)
    assert sorted(reference.unique().tolist()) == [LOW, HIGH]
    assert 0.3 < (reference == HIGH).double().mean() < 0.7


def test_a_finer_grid_holds_the_nodes_that_are_kept() -> None:
    fine = Darcy("train", 9, 2, solve_resolution=20)
    assert (fine.stride, fine.fine_resolution) == (3, 25)
    kept = next(samples(fine, CPU))
    whole = next(samples(Darcy("train", 25, 2), CPU))
    assert all(torch.equal(ours, all_nodes[:, ::3, ::3]) for ours, all_nodes in zip(kept, whole, strict=True))
    assert Darcy("train", 9, 2, solve_resolution=9).stride == Darcy("train", 9, 2).stride == 1


def test_a_finer_grid_gives_smaller_errors() -> None:
    """Compare with the finest grid, for smooth coefficients that all grids share."""
    x = torch.linspace(0, 1, 97, dtype=torch.float64)
    coefficients = (1 + x[:, None] * x)[None]

    def at_nine_nodes(step: int) -> Tensor:
        coarse = coefficients[:, ::step, ::step]
        return darcy.solve(coarse, ones_inside(coarse))[:, :: 12 // step, :: 12 // step]

    errors = [(at_nine_nodes(step) - at_nine_nodes(1)).abs().max() for step in (12, 4, 2)]
    assert errors[0] > 5 * errors[1] > 15 * errors[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "validation"}, "split='validation' must be 'train' or 'test'"),
        ({"resolution": 2}, "resolution=2 must be at least 3"),
        ({"num_samples": 0}, "num_samples=0 must be at least 1"),
        ({"tolerance": 1e-16}, "tolerance=1e-16 must be at least 1e-12"),
    ],
)
def test_bad_parameters_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Darcy(**{"split": "train", "resolution": 16, "num_samples": 4, **changes})


# ----------------------------------------------------------------------------------------------------------- files


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # neuralop's loaders always set it
def test_neuralops_loader_reads_the_files(tmp_path: Path) -> None:
    tests = [Darcy("test", resolution, 4) for resolution in (16, 32)]
    folder = cached_folder(tmp_path, TRAIN, tests, CPU)
    train, found, _ = datasets_darcy.load_darcy_pt(
        n_train=12,
        n_tests=[4, 4],
        batch_size=12,
        test_batch_sizes=[4, 4],
        data_root=folder,
        train_resolution=16,
        test_resolutions=[16, 32],
        num_workers=0,
    )
    batch = next(iter(train))
    coefficients, solutions = next(samples(TRAIN, CPU))
    assert torch.equal(batch["x"][:, 0], (coefficients == HIGH).float())
    assert torch.equal(batch["y"][:, 0], solutions.float())
    assert {n: next(iter(batches))["y"].shape for n, batches in found.items()} == {
        16: (4, 1, 16, 16),
        32: (4, 1, 32, 32),
    }


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Darcy]:
    """The parameters of all generated files."""
    calls: list[Darcy] = []
    monkeypatch.setattr(darcy, "generate", lambda parameters, device: calls.append(parameters) or {"x": 0, "y": 0})
    return calls


def test_files_are_generated_once_for_each_set_of_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    test = Darcy("test", 16, 4)
    first = cached_folder(tmp_path, TRAIN, [test], CPU)
    assert calls == [TRAIN, test]
    assert cached_folder(tmp_path, TRAIN, [test], CPU) == first
    finer = Darcy("test", 32, 4)
    assert cached_folder(tmp_path, TRAIN, [test, finer], CPU) == first
    assert calls == [TRAIN, test, finer]
    fields = {"num_samples": 5, "seed": 1, "solve_resolution": 99, "alpha": 2.5, "tau": 4.0, "tolerance": 1e-6}
    assert fields.keys() | {"split", "resolution"} == vars(TRAIN).keys(), "a new field: does it change the folder?"
    for field, value in fields.items():
        for train, other in (({field: value}, {}), ({}, {field: value})):
            changed = Darcy(**{**vars(TRAIN), **train}), [Darcy(**{**vars(test), **other})]
            assert cached_folder(tmp_path, *changed, CPU) != first
    assert len(calls) == 3 + 2 * 2 * len(fields)


def test_a_file_that_was_interrupted_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save: Callable[..., None] = torch.save

    def full_disk(value: object, file: Path) -> None:
        save(value, file)
        raise OSError("No space left on device")

    calls = counted(monkeypatch)
    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        cached_folder(tmp_path, TRAIN, [Darcy("test", 16, 4)], CPU)
    monkeypatch.setattr(torch, "save", save)
    folder = cached_folder(tmp_path, TRAIN, [Darcy("test", 16, 4)], CPU)
    assert [call.split for call in calls] == ["train", "train", "test"]
    assert (folder / "darcy_train_16.pt").exists()


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    generate(TRAIN, CPU)
    assert "Darcy, train, 16: 100%" in capsys.readouterr().err
