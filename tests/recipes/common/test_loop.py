"""What the loops share: a run's folder, and what is left of it for others."""

import os
from pathlib import Path

import pytest
from accelerate import Accelerator

from hf_memopt.disk.locks import WriterLock
from hf_memopt.recipes.common.loop import is_due, writing_to


def test_a_second_process_is_told_first(tmp_path: Path) -> None:
    with (
        WriterLock(tmp_path / ".lock", "theirs", "leave"),
        pytest.raises(ValueError, match=rf"{tmp_path}: process {os.getpid()} .* is writing there"),
        writing_to(tmp_path, Accelerator(cpu=True)),
    ):
        pytest.fail("never here")


def test_a_finished_runs_folder_is_free_again(tmp_path: Path) -> None:
    with writing_to(tmp_path, Accelerator(cpu=True)):
        assert (tmp_path / ".lock").exists()
    with WriterLock(tmp_path / ".lock", "theirs", "leave"):
        pass


def test_an_interval_of_zero_is_never_due() -> None:
    assert [number for number in range(1, 7) if is_due(number, 3)] == [3, 6]
    assert not is_due(6, 0)
