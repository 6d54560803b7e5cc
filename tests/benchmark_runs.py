"""Runs of the benchmarks' parts for accelerators."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
from accelerators import forget_accelerator
from fake_cuda.device import is_loaded

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NO_LIMIT = "--time-limit-s=3600"

Load = Callable[[str], Any]


@contextmanager
def loaded_benchmarks() -> Iterator[Load]:
    """Import modules of benchmarks/, whose cells run in this process, and undo it afterwards."""
    threads, before = torch.get_num_threads(), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as benchmarks do, undone here
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        cells = importlib.import_module("benchmarks.cells")
        patch.setattr(cells, "isolated", cells.in_this_process)
        patch.setattr(cells, "preload", lambda: None)
        yield lambda name: importlib.import_module(f"benchmarks.{name}")
    for name in set(sys.modules) - before:  # and the memory that they keep on the device
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.set_num_threads(threads)
    forget_accelerator()


def environ_of_processes() -> dict[str, str]:
    """Return the environment of benchmarks' processes and their forks, which get a fake GPU's operators."""
    paths = [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    if is_loaded():
        paths.insert(0, str(Path(fake_cuda.__file__).parent / "site"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def results_of(output: Path) -> dict[str, Any]:
    """Return the results, and check that the GPU was found."""
    results: dict[str, Any] = json.loads(output.read_text())
    assert results["hardware"]["device"] == "cuda"
    return results


def cells_of(output: Path) -> list[dict[str, Any]]:
    """Return the cells of a benchmark, none of them failed."""
    results = results_of(output)
    assert results["complete"]
    assert {cell["error"] for cell in results["cells"] if "error" in cell} == set()
    cells: list[dict[str, Any]] = results["cells"]
    return cells
