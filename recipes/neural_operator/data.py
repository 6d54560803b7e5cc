"""The data of `train_neural_operator.py`: generated, or the user's own files."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from neuralop.data.datasets.tensor_dataset import TensorDataset
from neuralop.data.transforms.data_processors import DefaultDataProcessor
from neuralop.data.transforms.normalizers import UnitGaussianNormalizer
from torch import Tensor
from torch.utils.data import Dataset

from hf_memopt.recipes.neural_operator.darcy import Darcy, cached_folder
from hf_memopt.recipes.neural_operator.files import Fields, FieldShape, read
from hf_memopt.recipes.neural_operator.options import DataOptions

logger = logging.getLogger(__name__)


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
