"""Darcy flow through porous ground: coefficient fields, their solutions, and files that neuralop's loaders read.

    -div(a grad u) = f in the unit square, u = 0 on its boundary

with f = 1 and a coefficient of 12 where a Gaussian random field is positive and 3 elsewhere, as in Li et al. (2021,
arXiv:2010.08895). Nodes lie on a square grid whose outermost ones are the boundary. Coefficients at the faces between
nodes are means of the two nodes', which conserves the flux and gives second order where `a` is smooth.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm.auto import tqdm

from hf_memopt.disk.files_on_disk import put_in_place
from hf_memopt.ranges import COUNT, Range

HIGH, LOW = 12.0, 3.0
__all__ = ["Darcy", "cached_folder"]

FORMAT_VERSION = 1  # part of every cache key: another one whenever the same parameters would give other fields
MAX_ITERATIONS = 200
BATCH_NODES = 2**17
RANGES = {
    "resolution": Range(at_least=3, whole=True, why=": the outermost nodes are the boundary"),
    "num_samples": COUNT,
    "tolerance": Range(at_least=1e-12, below=1),  # float64 reaches no more
}


@dataclass(frozen=True)
class Darcy:
    """The parameters that decide the samples of one file.

    Attributes:
        split: "train" or "test"; the two are drawn from different random numbers.
        resolution: nodes along each side, those on the boundary included.
        num_samples: pairs of coefficient and solution.
        seed: seed of the random fields.
        solve_resolution: solve on a finer grid, of this many nodes or the next more that contains every node wanted,
            and keep those. Solutions of different resolutions then carry about the same error. 0: no finer grid.
        alpha: smoothness of the random field, whose covariance is (-Laplacian + tau^2)^-alpha.
        tau: inverse length scale of the random field.
        tolerance: largest residual of a solution, relative to the source.
    """

    split: str
    resolution: int
    num_samples: int
    seed: int = 0
    solve_resolution: int = 0
    alpha: float = 2.0
    tau: float = 3.0
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        if self.split not in ("train", "test"):
            raise ValueError(f"split={self.split!r} must be 'train' or 'test'")
        for name, allowed in RANGES.items():
            allowed.check(name, getattr(self, name))

    @property
    def stride(self) -> int:
        """Distance of the kept nodes on the finer grid."""
        return max(1, -(-(self.solve_resolution - 1) // (self.resolution - 1)))

    @property
    def fine_resolution(self) -> int:
        return (self.resolution - 1) * self.stride + 1


def random_fields(noise: Tensor, alpha: float, tau: float) -> Tensor:
    """Return Gaussian random fields without mean, `(batch, nodes, nodes)`, from normal numbers of that shape.

    Their cosine coefficients are the noise, scaled as the covariance (-Laplacian + tau^2)^-alpha says.
    """
    nodes = noise.shape[-1]
    wave = torch.arange(nodes, dtype=noise.dtype, device=noise.device)
    square = torch.pi**2 * (wave[:, None] ** 2 + wave[None] ** 2)
    scale = nodes * tau ** (alpha - 1) * (square + tau**2) ** (-alpha / 2)
    scale[0, 0] = 0
    cosines = torch.cos(torch.pi / nodes * torch.outer(wave + 0.5, wave)) * (2 / nodes) ** 0.5
    cosines[:, 0] /= 2**0.5
    return cosines @ (scale * noise) @ cosines.T


def operator(coefficients: Tensor) -> Callable[[Tensor], Tensor]:
    """Return -div(a grad u) at the inner nodes, `(batch, nodes - 2, nodes - 2)`, as a function of `u` there."""
    scale = 0.5 * (coefficients.shape[-1] - 1) ** 2
    vertical = scale * (coefficients[:, 1:, 1:-1] + coefficients[:, :-1, 1:-1])
    horizontal = scale * (coefficients[:, 1:-1, 1:] + coefficients[:, 1:-1, :-1])
    diagonal = vertical[:, 1:] + vertical[:, :-1] + horizontal[:, :, 1:] + horizontal[:, :, :-1]
    vertical, horizontal = vertical[:, 1:-1], horizontal[:, :, 1:-1]

    def apply(interior: Tensor) -> Tensor:
        result = diagonal * interior
        result[:, 1:].addcmul_(vertical, interior[:, :-1], value=-1)
        result[:, :-1].addcmul_(vertical, interior[:, 1:], value=-1)
        result[:, :, 1:].addcmul_(horizontal, interior[:, :, :-1], value=-1)
        result[:, :, :-1].addcmul_(horizontal, interior[:, :, 1:], value=-1)
        return result

    return apply


def solve(coefficients: Tensor, source: Tensor, tolerance: float = 1e-8) -> Tensor:
    """Return solutions at all nodes, by conjugate gradients for the whole batch at once, on the tensors' device.

    The preconditioner is the Laplacian, inverted exactly in the basis of sines by two dense matrix products each way.
    That bounds the number of iterations by the contrast of the coefficients, at any resolution: about 20 for a contrast
    of 4 and a tolerance of 1e-8. Cost: O(nodes^3) per sample and iteration.

    Args:
        coefficients: `(batch, nodes, nodes)`, positive, in float64 for tolerances below 1e-5.
        source: `f` at the inner nodes, `(batch, nodes - 2, nodes - 2)`.
        tolerance: largest norm of the residual, as computed anew from the solution, relative to the source's.
    """
    apply, precondition = operator(coefficients), _inverse_laplacian(coefficients)
    # The residual that the iteration keeps is only nearly the true one, hence the half, and the check at the end.
    limit = 0.5 * tolerance * _norm(source)
    tiny = torch.finfo(source.dtype).tiny  # a sample that is solved exactly waits for the others
    solution, residual = torch.zeros_like(source), source.clone()
    direction = preconditioned = precondition(residual)
    energy = _dot(residual, preconditioned)
    for _ in range(MAX_ITERATIONS):
        product = apply(direction)
        step = energy / _dot(direction, product).clamp_min(tiny)
        solution += step * direction
        residual -= step * product
        if (_norm(residual) <= limit).all():
            break
        preconditioned = precondition(residual)
        last, energy = energy, _dot(residual, preconditioned)
        direction = preconditioned + energy / last.clamp_min(tiny) * direction
    solution = pad(solution, (1, 1, 1, 1))
    reached = relative_residual(coefficients, solution, source).max().item()
    if not reached <= tolerance:
        raise RuntimeError(
            f"tolerance={tolerance} was not reached: a relative residual is {reached:.1e}; is the tolerance beyond "
            f"{coefficients.dtype}, or the contrast of the coefficients extreme "
            f"({float(coefficients.max() / coefficients.min()):g})?"
        )
    return solution


def _inverse_laplacian(coefficients: Tensor) -> Callable[[Tensor], Tensor]:
    nodes = coefficients.shape[-1]
    wave = torch.arange(1, nodes - 1, dtype=coefficients.dtype, device=coefficients.device)
    sines = torch.sin(torch.pi / (nodes - 1) * torch.outer(wave, wave)) * (2 / (nodes - 1)) ** 0.5
    eigenvalues = (2 - 2 * torch.cos(torch.pi * wave / (nodes - 1))) * (nodes - 1) ** 2
    inverse = 1 / (eigenvalues[:, None] + eigenvalues[None])
    return lambda residual: sines @ ((sines @ residual @ sines) * inverse) @ sines


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=(1, 2), keepdim=True)


def _norm(a: Tensor) -> Tensor:
    return torch.linalg.vector_norm(a, dim=(1, 2), keepdim=True)


def relative_residual(coefficients: Tensor, solutions: Tensor, source: Tensor) -> Tensor:
    """Return the norm of `f + div(a grad u)` over that of `f`, `(batch,)`, for solutions at all nodes."""
    residual = source - operator(coefficients)(solutions[:, 1:-1, 1:-1])
    return (_norm(residual) / _norm(source).clamp_min(torch.finfo(source.dtype).tiny)).flatten()


def samples(darcy: Darcy, device: torch.device, batch_size: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of coefficients and solutions in float64, `(batch, resolution, resolution)`, on `device`.

    Which samples come does not depend on the batch size, whose default keeps a batch's arrays within a processor's
    cache where possible. Between devices they agree up to rounding.
    """
    # The seeds of the two splits never meet, and neither do those of neighbouring seeds.
    generator = torch.Generator().manual_seed(2 * darcy.seed + (darcy.split == "test"))
    nodes, kept = darcy.fine_resolution, slice(None, None, darcy.stride)
    batch_size = batch_size or max(1, BATCH_NODES // nodes**2)
    for start in range(0, darcy.num_samples, batch_size):
        size = min(batch_size, darcy.num_samples - start)
        draws = [torch.randn(nodes, nodes, generator=generator, dtype=torch.float64) for _ in range(size)]
        fields = random_fields(torch.stack(draws).to(device), darcy.alpha, darcy.tau)
        coefficients = torch.where(fields >= 0, HIGH, LOW).to(torch.float64)
        source = torch.ones_like(coefficients[:, 1:-1, 1:-1])
        solutions = solve(coefficients, source, darcy.tolerance)
        yield coefficients[:, kept, kept], solutions[:, kept, kept]


def generate(darcy: Darcy, device: torch.device) -> dict[str, Tensor]:
    """Return all samples as neuralop's files hold them, `(num_samples, resolution, resolution)`, on the CPU.

    `x`, bool, is where the coefficient is the high one; `y`, float32, the solution in the equation's own units, at most
    about 0.02.
    """
    with tqdm(total=darcy.num_samples, desc=f"Darcy, {darcy.split}, {darcy.resolution}", unit="sample") as bar:
        found = []
        for coefficients, solutions in samples(darcy, device):
            found.append(((coefficients == HIGH).cpu(), solutions.float().cpu()))
            bar.update(len(coefficients))
    return {name: torch.cat(parts) for name, parts in zip(("x", "y"), zip(*found, strict=True), strict=True)}


def cached_folder(root: Path, train: Darcy, tests: list[Darcy], device: torch.device) -> Path:
    """Return a folder with `darcy_train_<resolution>.pt` and `darcy_test_<resolution>.pt`, generated where missing.

    Its name has all that the data were made from, down to the last parameter, so that other parameters never find it. A
    file has its final name only once it is complete.
    """
    shared = replace(train, split="train", resolution=3)
    others = [replace(test, resolution=3) for test in tests]
    if len(set(others)) > 1:
        raise ValueError(f"tests: test files of one folder differ in their resolution alone, and these do not: {tests}")
    key = {"format": FORMAT_VERSION, "train": asdict(shared), "test": asdict(others[0])}
    text = json.dumps(key, indent=1, sort_keys=True)
    folder = root / f"darcy-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parameters.json").write_text(text + "\n")
    for darcy in (train, *tests):
        file = folder / f"darcy_{darcy.split}_{darcy.resolution}.pt"
        if not file.exists():
            draft = file.with_suffix(f".{os.getpid()}.partial")
            torch.save(generate(darcy, device), draft)
            put_in_place(draft, file)
    return folder
