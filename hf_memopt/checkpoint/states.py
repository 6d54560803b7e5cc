"""Unpickles checkpoints: tensors and plain values, never code, and random states that can be set here."""

import os
import pickle
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from accelerate.utils import RNG_STATE_NAME, load

_PICKLES = (".bin", ".pkl", ".pt")
_SHARDS = "torch.distributed.checkpoint"
# Classes in the index of a sharded state, beside torch's dtypes.
_OF_AN_INDEX = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # as Python 3.13 names it
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_SHARDS}.filesystem", "_StorageInfo"),
    *((f"{_SHARDS}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_SHARDS}.metadata", f"{name}StorageMetadata") for name in ("Bytes", "Chunk", "Tensor")),
    (f"{_SHARDS}.metadata", "_MEM_FORMAT_ENCODING"),
}
_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def check_pickles(checkpoint: Path) -> None:
    """Unpickle the files that accelerate will, without reading tensors; ValueError for more than plain values."""
    for file in sorted(checkpoint.iterdir()):
        if file.suffix in _PICKLES:
            _read(file)
    for index in sorted(checkpoint.glob("*/.metadata")):
        try:
            with index.open("rb") as opened:
                _IndexUnpickler(opened).load()
        except Exception as error:  # a forged pickle can raise anything
            raise ValueError(
                f"{index} is not what torch.distributed.checkpoint writes, and no code in it is run: "
                f"{type(error).__name__}: {error}"
            ) from error


def check_random_states(checkpoint: Path, process_index: int, device: torch.device) -> None:
    """Set generators of our own to a process's states, ValueError if that fails: accelerate passes over it."""
    file = checkpoint / f"{RNG_STATE_NAME}_{process_index}.pkl"
    states = _read(file)
    try:
        random.Random().setstate(states["random_state"])
        np.random.RandomState().set_state(states["numpy_random_seed"])
        torch.Generator().set_state(states["torch_manual_seed"])
        if device.type in ("cuda", "xpu"):
            of_devices = states[f"torch_{device.type}_manual_seed"]
            torch.Generator(device).set_state(of_devices[device.index or 0])
        int(states["step"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{file}: these random states cannot be set here ({type(error).__name__}: {error}), and the resumed run "
            f"would differ; resume with the versions of Python, numpy and torch that saved them"
        ) from error


@contextmanager
def weights_only() -> Iterator[None]:
    """Make torch load tensors and plain values alone inside, even if its callers ask for more."""
    with patch.dict(os.environ, {_FORCE: "1"}):
        os.environ.pop(_FORCE_NOT, None)
        yield


class _IndexUnpickler(pickle.Unpickler):
    """Makes the classes in an index of shards, and no others: torch's reader would make any class that it names."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _OF_AN_INDEX:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _read(file: Path) -> Any:
    """Load as accelerate's loader does, with the globals that it allows for random states."""
    try:
        with weights_only():
            return load(file, map_location="cpu", mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = named[1] if named else "code"
        raise ValueError(
            f"{file} holds more than tensors, numbers, strings, lists, tuples and dicts: {what}, whose code is not "
            f"run. Let the state_dict of registered objects return nothing else, or, if you trust that class, allow "
            f"it with torch.serialization.add_safe_globals"
        ) from error
    except Exception as error:  # a forged pickle can raise anything
        raise ValueError(f"{file} is not what torch.save writes: {type(error).__name__}: {error}") from error
