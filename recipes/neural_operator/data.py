"""The data of `train_neural_operator.py`: generated, or the user's own files: torch's, HDF5 or NumPy's.

Fields in files come with or without channels, on a grid of any dimension.
"""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from neuralop.data.datasets.tensor_dataset import TensorDataset
from neuralop.data.transforms.data_processors import DefaultDataProcessor
from neuralop.data.transforms.normalizers import UnitGaussianNormalizer
from torch import Tensor
from torch.utils.data import Dataset

from hf_memopt.recipes.common.flags import readable
from hf_memopt.recipes.neural_operator.darcy import Darcy, cached_folder
from hf_memopt.recipes.neural_operator.options import DataOptions

logger = logging.getLogger(__name__)


_SUFFIXES = (".pt", ".h5", ".hdf5", ".npz")  # .npy has one array, so that a file of its own holds each key


class FieldShape(NamedTuple):
    """The channels of inputs and outputs, and the nodes along each side of their grid."""

    in_channels: int
    out_channels: int
    sides: tuple[int, ...]

    def for_model(self) -> tuple[int, int, int]:
        return self.in_channels, self.out_channels, len(self.sides)

    def __str__(self) -> str:
        channels = f"{self.in_channels} to {self.out_channels} channels on "
        return ("" if self[:2] == (1, 1) else channels) + " x ".join(map(str, self.sides))


class Fields(NamedTuple):
    """Inputs and outputs in float32, `(samples, channels, *sides)`."""

    x: Tensor
    y: Tensor

    @property
    def shape(self) -> FieldShape:
        return FieldShape(self.x.shape[1], self.y.shape[1], tuple(self.x.shape[2:]))


def read(folder: Path, name: str, num_samples: int | None, options: DataOptions, modes: int) -> Fields:
    """Return the first `num_samples` fields of a file, all for None.

    Raises:
        ValueError: the file or a key is missing, the numbers are complex, there are too few samples, or `x` and `y` lie
            on different grids, or on one that is too coarse for `modes`.
    """
    keys = (options.input_key, options.output_key)
    file, arrays = _read_arrays(folder, name, keys, num_samples)
    for key, array in arrays.items():
        if array.is_complex():
            raise ValueError(f"{file}: {key!r} is complex; store real and imaginary parts as two channels")
    x, y = (arrays[key].to(torch.float32) for key in keys)
    fields = with_channels(x, y, file, options.num_dims, modes)
    fewest = min(map(len, fields))
    if num_samples is not None and fewest < num_samples:
        field = "num_train" if "_train_" in name else "num_test"
        raise ValueError(
            f"{field}={num_samples}: a file in data_folder={options.data_folder!r} has {fewest} samples ({file.name})"
        )
    if min(fields.shape.sides) < modes:
        raise ValueError(
            f"modes={modes}: the grid of {file}, {fields.shape}, has no such frequencies; use "
            f"--modes {min(fields.shape.sides)} at most, or finer data"
        )
    return fields


def with_channels(x: Tensor, y: Tensor, file: Path, num_dims: int | None, modes: int) -> Fields:
    """Return both with an axis for channels behind the samples.

    `num_dims` axes are the grid's. For None these are all behind the samples, unless the first of them differs between
    `x` and `y` or is shorter than `modes`, and so holds channels. Where four axes allow both, it is asked for.
    """
    shapes = f"x {_size(x)} and y {_size(y)}"
    possible = [dims for dims in range(1, 4) if _is_grid(x, y, dims)]
    if num_dims is None and len(possible) > 1:
        fine = [dims for dims in possible if min(x.shape[-dims:]) >= modes]
        possible = (fine or possible)[-1:] if possible[-1] < 3 or len(fine) < 2 else fine
    if num_dims is not None:
        possible = [dims for dims in possible if dims == num_dims]
    if not possible:
        wanted = "1 to 3" if num_dims is None else num_dims
        raise ValueError(
            f"{file}: {shapes} are no fields on one grid of {wanted} dimensions; store them as (samples, *grid) or "
            "(samples, channels, *grid)"
        )
    if len(possible) > 1:
        raise ValueError(
            f"{file}: {shapes} may be fields of {' or '.join(map(str, possible))} dimensions; pass --num_dims"
        )
    (dims,) = possible
    return Fields(*(each if each.ndim == dims + 2 else each.unsqueeze(1) for each in (x, y)))


def _is_grid(x: Tensor, y: Tensor, dims: int) -> bool:
    return x.shape[-dims:] == y.shape[-dims:] and all(each.ndim - dims in (1, 2) for each in (x, y))


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def _read_arrays(
    folder: Path, name: str, keys: tuple[str, str], num_samples: int | None
) -> tuple[Path, dict[str, Tensor]]:
    file = next((folder / f"{name}{suffix}" for suffix in _SUFFIXES if (folder / f"{name}{suffix}").is_file()), None)
    if file is not None:
        return file, _of_file(file, keys, num_samples)
    files = {key: folder / f"{name}_{key}.npy" for key in keys}
    if not all(each.is_file() for each in files.values()):
        raise ValueError(
            f"data_folder={str(folder)!r} lacks {name}.pt; choose --resolution and --test_resolutions that it holds "
            f"(.h5, .npz, or {files[keys[0]].name} beside {files[keys[1]].name} serve as well), or leave --data_folder "
            "out to generate data"
        )
    arrays = {}
    for key, each in files.items():
        with readable(each):
            arrays[key] = torch.from_numpy(np.load(each, mmap_mode="r", allow_pickle=False)[:num_samples].copy())
    return files[keys[0]], arrays


def _of_file(file: Path, keys: tuple[str, str], num_samples: int | None) -> dict[str, Tensor]:
    with readable(file):
        opened = _opened(file)
    with opened as found:
        _check_keys(found, keys, file)
        with readable(file):
            arrays = {key: torch.as_tensor(found[key][:num_samples]) for key in keys}
            for key, array in arrays.items():
                if array.is_meta or array.is_quantized:
                    raise TypeError(f"{key!r} holds no numbers of its own")
        return arrays


def _opened(file: Path) -> Any:
    if file.suffix == ".pt":
        return nullcontext(torch.load(file, map_location="cpu", weights_only=True))
    if file.suffix == ".npz":
        return np.load(file, allow_pickle=False)
    import h5py

    opened = h5py.File(file, "r")

    def outside(name: str, link: Any) -> str | None:
        held = opened[name] if isinstance(link, h5py.HardLink) else link
        is_elsewhere = isinstance(held, h5py.Dataset) and bool(held.is_virtual or held.external)
        return name if is_elsewhere or isinstance(held, h5py.ExternalLink) else None

    # HDF5 would show them as this file's own, and fill values where the other file is missing.
    if (name := opened.visititems_links(outside)) is not None:
        raise ValueError(f"the numbers of {name!r} lie elsewhere: an external link, virtual dataset or raw storage")
    return opened


def _check_keys(found: Any, keys: tuple[str, str], file: Path) -> None:
    if not isinstance(found, Mapping):
        raise ValueError(f"{file} holds a {type(found).__name__}; store a dictionary of tensors")
    for flag, key in zip(("input_key", "output_key"), keys, strict=True):
        if key not in found:
            raise ValueError(f"{flag}={key!r}: {file} holds {', '.join(sorted(map(str, found)))}; pass --{flag}")


class Data(NamedTuple):
    """Samples are dictionaries of `x` and `y`, `(channels, *sides)`; the processor normalises solutions."""

    train: Dataset[Any]
    tests: dict[int, Dataset[Any]]
    processor: DefaultDataProcessor
    shape: FieldShape


def load(options: DataOptions, device: torch.device, modes: int = 2) -> Data:
    """Return the fields that the flags name. ValueError as from `read`, or for test data of other channels."""
    folder = _generated(options, device) if options.data_folder is None else Path(options.data_folder)
    names = {resolution: f"darcy_test_{resolution}" for resolution in options.test_resolutions}
    train = read(folder, _train_name(options), options.num_train, options, modes)
    tests = {resolution: read(folder, name, options.num_test, options, modes) for resolution, name in names.items()}
    for name, test in zip(names.values(), tests.values(), strict=True):
        if test.shape.for_model() != train.shape.for_model():
            raise ValueError(f"{folder / name} has {test.shape}, and the training data {train.shape}; use alike fields")
    for name, fields in zip((_train_name(options), *names.values()), (train, *tests.values()), strict=True):
        _warn_of_bad_numbers(fields, folder / name)
    datasets = {resolution: TensorDataset(*test) for resolution, test in tests.items()}
    return Data(TensorDataset(*train), datasets, make_processor(train.y), train.shape)


def shape_of(options: DataOptions, modes: int) -> FieldShape:
    if options.data_folder is None:
        return FieldShape(1, 1, (options.resolution, options.resolution))
    return read(Path(options.data_folder), _train_name(options), None, options, modes).shape


def make_processor(y: Tensor) -> DefaultDataProcessor:
    """Return neuralop's processor, which normalises each channel of the solutions, `(samples, channels, *sides)`."""
    normalizer = UnitGaussianNormalizer(dim=[axis for axis in range(y.ndim) if axis != 1])
    normalizer.fit(y)
    return DefaultDataProcessor(in_normalizer=None, out_normalizer=normalizer)


def describe(options: DataOptions) -> str:
    if options.data_folder is not None:
        return f"files in {options.data_folder}"
    solved = f", solved at {options.solve_resolution} and more" if options.solve_resolution else ""
    return f"Darcy flow, generated, seed {options.data_seed}{solved}"


def _generated(options: DataOptions, device: torch.device) -> Path:
    shared = {"seed": options.data_seed, "solve_resolution": options.solve_resolution}
    train = Darcy("train", options.resolution, options.num_train, **shared)
    tests = [Darcy("test", resolution, options.num_test, **shared) for resolution in options.test_resolutions]
    return cached_folder(Path(options.cache_folder), train, tests, device)


def _train_name(options: DataOptions) -> str:
    return f"darcy_train_{options.resolution}"


def _warn_of_bad_numbers(fields: Fields, file: Path) -> None:
    for key, values in fields._asdict().items():
        bad = torch.logical_not(values.isfinite()).flatten(1).any(dim=1).nonzero().flatten()
        if len(bad):
            logger.warning(
                f"{file}: {key} is not finite in {len(bad)} of {len(values)} samples, first in sample {bad[0]}"
            )
