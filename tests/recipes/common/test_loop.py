import io
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from filelock import FileLock
from late_imports import LateModule
from tqdm import tqdm

from hf_memopt.memory import MemoryLogger
from hf_memopt.recipes.common.loop import (
    Progress,
    advance,
    is_due,
    pins_memory,
    record,
    saving_after_errors,
    writing_to,
)
from hf_memopt.recipes.fluxflow.options import DataOptions

fluxflow_data = LateModule("hf_memopt.recipes.fluxflow.data")


def test_a_second_process_is_told_first(tmp_path: Path) -> None:
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(ValueError, match=rf"{tmp_path}: another process is writing there"),
        writing_to(tmp_path, Accelerator(cpu=True)),
    ):
        pytest.fail("never here")


def test_a_finished_runs_folder_is_free_again(tmp_path: Path) -> None:
    with writing_to(tmp_path, Accelerator(cpu=True)):
        assert (tmp_path / ".lock").exists()
    with FileLock(tmp_path / ".lock", blocking=False):
        pass


def test_an_interval_of_zero_is_never_due() -> None:
    assert [number for number in range(1, 7) if is_due(number, 3)] == [3, 6]
    assert not is_due(6, 0)


def test_log_and_progress_bar_say_what_memory_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    run = SimpleNamespace(accelerator=accelerator, progress=Progress(), memory=MemoryLogger(accelerator))
    caplog.set_level(logging.INFO, logger="hf_memopt")
    with tqdm(total=2, file=io.StringIO()) as bar:
        advance(run, bar)
        assert bar.n == 1
        assert re.fullmatch(r"host: \d+\.\dGB", bar.postfix)
    record(run, "update", 3, {"loss": 0.5})
    assert run.progress.history == [{"update": 3, "loss": 0.5}]
    assert re.fullmatch(r"update +3  loss 0\.5  host: \d+\.\dGB", caplog.messages[-1])


@pytest.mark.parametrize(("weight", "saved"), [(1e30, [5]), (float("inf"), [])])
def test_weights_that_overflowed_are_no_checkpoint(
    weight: float, saved: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(torch.nn.Linear(1, 1))
    torch.nn.init.constant_(model.weight, weight)
    written: list[int] = []
    checkpoints = SimpleNamespace(save=lambda number, position: written.append(number))
    run = SimpleNamespace(accelerator=accelerator, progress=Progress(num_updates=5), position=dict)
    with pytest.raises(FloatingPointError), saving_after_errors(run, checkpoints):
        raise FloatingPointError("the loss is NaN")
    assert written == saved
    assert ("The weights overflowed in the update before" in caplog.text) != bool(saved)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(("kind", "pinned"), [("cuda", True), ("xpu", True), ("mps", False), (None, False)])
def test_batches_are_pinned_for_devices_with_memory_of_their_own(
    kind: str | None, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    assert pins_memory() is pinned
    loader = fluxflow_data.make_loader(fluxflow_data.load(DataOptions(num_drawn=2), 4, 0), DataOptions(), 1, 0, 0, 1)(0)
    assert loader.pin_memory is pinned
