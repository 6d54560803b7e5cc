"""The data of `train_neural_operator.py`: generated, or neuralop's own files where the user has them."""

import contextlib
import io
from pathlib import Path
from typing import Any, NamedTuple

import torch
from neuralop.data.datasets.pt_dataset import PTDataset
from neuralop.data.transforms.data_processors import DefaultDataProcessor
from torch.utils.data import Dataset

from hf_memopt.recipes.neural_operator.darcy import Darcy, cached_folder
from hf_memopt.recipes.neural_operator.options import DataOptions


class Data(NamedTuple):
    """Samples are dictionaries of `x` and `y`, `(1, nodes, nodes)`; the processor normalises solutions."""

    train: Dataset[Any]
    tests: dict[int, Dataset[Any]]
    processor: DefaultDataProcessor


def load(options: DataOptions, device: torch.device) -> Data:
    folder = _generated(options, device) if options.data_folder is None else Path(options.data_folder)
    _check_files(folder, options)
    num_tests = len(options.test_resolutions)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints which file it reads
        # Its subclass DarcyDataset knows the published resolutions only.
        found = PTDataset(
            folder,
            "darcy",
            n_train=options.num_train,
            n_tests=[options.num_test] * num_tests,
            batch_size=1,  # of loaders that are not made here
            test_batch_sizes=[1] * num_tests,
            train_resolution=options.resolution,
            test_resolutions=options.test_resolutions,
        )
    _check_sizes(found, options)
    return Data(found.train_db, found.test_dbs, found.data_processor)


def describe(options: DataOptions) -> str:
    if options.data_folder is not None:
        return f"files in {options.data_folder}"
    solved = f", solved at {options.solve_resolution} and more" if options.solve_resolution else ""
    return f"generated, seed {options.data_seed}{solved}"


def _generated(options: DataOptions, device: torch.device) -> Path:
    shared = {"seed": options.data_seed, "solve_resolution": options.solve_resolution}
    train = Darcy("train", options.resolution, options.num_train, **shared)
    tests = [Darcy("test", resolution, options.num_test, **shared) for resolution in options.test_resolutions]
    return cached_folder(Path(options.cache_folder), train, tests, device)


def _check_files(folder: Path, options: DataOptions) -> None:
    names = [f"darcy_train_{options.resolution}.pt", *(f"darcy_test_{n}.pt" for n in options.test_resolutions)]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"data_folder={str(folder)!r} lacks {', '.join(missing)}; choose --resolution and --test_resolutions that "
            "it holds, or leave --data_folder out to generate data"
        )


def _check_sizes(found: PTDataset, options: DataOptions) -> None:
    sizes = [("num_train", options.num_train, found.train_db)]
    sizes += [("num_test", options.num_test, dataset) for dataset in found.test_dbs.values()]
    for name, wanted, dataset in sizes:
        if len(dataset) < wanted:
            raise ValueError(
                f"{name}={wanted}: a file in data_folder={options.data_folder!r} has {len(dataset)} samples"
            )
