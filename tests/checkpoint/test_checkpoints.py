"""Tests that a resumed run goes on bit for bit, and that only saved states are ever loaded."""

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from filelock import FileLock, Timeout
from refusals import assert_refused
from toy_run import BATCHES_PER_STEP, NUM_STEPS, ToyRun

from hf_memopt.checkpoint import Checkpoints, files
from hf_memopt.disk.files_on_disk import sha256

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def names(folder: Path) -> list[str]:
    """Return all names but the lock's."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


class Killed(BaseException):
    """An error that no handler catches."""


@pytest.mark.parametrize("last_batch", range(1, BATCHES_PER_STEP * NUM_STEPS))
def test_a_run_killed_at_any_batch_resumes_bit_for_bit(
    last_batch: int, uninterrupted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = Accelerator.backward
    count = iter(range(1, 100))

    def killing(accelerator: Accelerator, loss: torch.Tensor) -> None:
        if next(count) > last_batch:
            raise Killed
        backward(accelerator, loss)

    monkeypatch.setattr(Accelerator, "backward", killing)
    with pytest.raises(Killed):
        ToyRun(tmp_path).train(save=True)
    monkeypatch.undo()
    resumed = ToyRun(tmp_path, seed=1)
    assert resumed.checkpoints.has_latest == (last_batch >= BATCHES_PER_STEP)
    if last_batch >= BATCHES_PER_STEP:
        resumed.resume()
        assert resumed.num_steps == last_batch // BATCHES_PER_STEP
        resumed.train()
        assert resumed.state() == uninterrupted


def test_a_run_that_is_not_resumed_ends_elsewhere(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """Make the comparison above fail in every single figure."""
    other = ToyRun(tmp_path, seed=1)
    other.train(NUM_STEPS - 1)
    state = other.state()
    assert [name for name in uninterrupted if state[name] == uninterrupted[name]] == []


def test_saving_changes_nothing(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    run = ToyRun(tmp_path)
    run.train(save=True)
    assert run.state() == uninterrupted


def test_a_folder_holds_the_last_checkpoints_and_says_which_is_newest(saved: ToyRun) -> None:
    folder = saved.checkpoints.folder
    assert names(folder) == ["latest", "step-000002", "step-000003"]
    name, digest, run = (folder / "latest").read_text().split()
    assert name == "step-000003"
    assert digest == sha256(folder / name / "manifest.json")
    manifest = json.loads((folder / name / "manifest.json").read_text())
    assert run == manifest["run"] == json.loads((folder / "step-000002" / "manifest.json").read_text())["run"]
    assert manifest["position"] == {"step": 3, "losses": saved.losses}
    assert manifest["launch"] == {"num_processes": 1, "device": "cpu", "mixed_precision": "no", "sharded": False}
    assert set(manifest["files"]) == {path.name for path in (folder / name).iterdir()} - {"manifest.json"}
    assert "random_states_0.pkl" in manifest["files"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_have_the_mode_that_the_umask_gives(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        run = ToyRun(tmp_path / "run")
        run.train(1, save=True)
    finally:
        os.umask(before)
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len(paths) > 8
    for path in paths:
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_step_is_saved_once(saved: ToyRun) -> None:
    before = (saved.checkpoints.folder / "latest").stat().st_ino
    assert saved.save() == saved.checkpoints.folder / "step-000003"
    resumed = ToyRun(saved.checkpoints.folder)
    resumed.resume()
    resumed_at = (saved.checkpoints.folder / "latest").stat().st_ino
    resumed.save()
    assert (saved.checkpoints.folder / "latest").stat().st_ino == resumed_at
    assert before  # kept by both calls


def test_what_an_interrupted_save_left_is_cleared_away(saved: ToyRun) -> None:
    folder = saved.checkpoints.folder
    (folder / "step-000004.partial" / "inner").mkdir(parents=True)
    (folder / "step-000001.removed").mkdir()
    (folder / "latest.partial").write_text("step")
    shutil.copytree(folder / "step-000003", folder / "step-000004")  # complete, but never named by `latest`
    resumed = ToyRun(folder)
    resumed.resume()
    resumed.train(4, save=True)
    assert names(folder) == ["latest", "step-000003", "step-000004"]
    assert files.verified(folder, "latest")[1]["step"] == 4


def test_going_back_to_an_older_checkpoint(saved: ToyRun, uninterrupted: dict[str, Any]) -> None:
    folder = saved.checkpoints.folder
    for name in ("step-000002", folder / "step-000002"):
        resumed = ToyRun(folder)
        resumed.resume(name)
        assert (folder / "latest").read_text().startswith("step-000002\n")
        resumed.train(save=True)  # overwrites step 3
        assert resumed.state() == uninterrupted
        shutil.rmtree(folder)
        ToyRun(folder).train(3, save=True)


def test_a_checkpoint_of_another_run_goes_on_in_a_folder_of_its_own(
    saved: ToyRun, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in saved.checkpoints.folder.rglob("*") if path.is_file()}
    resumed = ToyRun(tmp_path / "other")
    resumed.resume(saved.checkpoints.folder / "step-000003")
    assert not resumed.checkpoints.has_latest
    resumed.train(save=True)
    assert resumed.state() == uninterrupted
    assert before == {path: path.read_bytes() for path in saved.checkpoints.folder.rglob("*") if path.is_file()}


def test_a_folder_that_was_moved_goes_on_from_another_working_directory(
    uninterrupted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ToyRun(Path("run")).train(3, save=True)
    (tmp_path / "elsewhere").mkdir()
    shutil.move("run", "elsewhere/moved")
    monkeypatch.chdir("elsewhere")
    resumed = ToyRun(Path("moved"), seed=1)
    resumed.resume()
    resumed.train(save=True)
    assert resumed.state() == uninterrupted


def test_a_renamed_copy_goes_on_in_a_folder_of_its_own(saved: ToyRun, tmp_path: Path) -> None:
    copy = shutil.copytree(saved.checkpoints.folder / "step-000002", tmp_path / "before-it-diverged")
    resumed = ToyRun(tmp_path / "other")
    resumed.resume(copy)
    resumed.train(save=True)
    assert names(tmp_path / "other") == ["latest", "step-000005", "step-000006"]


@pytest.mark.parametrize(
    ("name", "value"), [("num_processes", 2), ("device", "cuda"), ("mixed_precision", "bf16"), ("sharded", True)]
)
def test_another_launch_is_refused(name: str, value: Any, saved: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Checkpoints._launch
    monkeypatch.setattr(Checkpoints, "_launch", lambda self: {**launch(self), name: value})
    other = ToyRun(saved.checkpoints.folder)
    with pytest.raises(ValueError, match=rf"was saved with {name}=.*, and this run has {value!r}"):
        other.checkpoints.resume("latest")


def test_bad_arguments_are_refused(saved: ToyRun, tmp_path: Path) -> None:
    checkpoints = saved.checkpoints
    with pytest.raises(ValueError, match="keep_last=0 must be at least 1"):
        Checkpoints(saved.accelerator, tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="step=-1 must not be negative"):
        checkpoints.save(-1, {})
    with pytest.raises(ValueError, match=r"position=.*Tensor is not JSON serializable; use numbers"):
        checkpoints.save(4, {"loss": torch.ones(())})
    with pytest.raises(ValueError, match="holds step-000003, which this run neither saved nor resumed from"):
        Checkpoints(saved.accelerator, checkpoints.folder).save(1, {})
    with saved.accelerator.accumulate(saved.model):
        assert not saved.accelerator.sync_gradients
        with pytest.raises(ValueError, match="step=4: this is the middle of an accumulation window"):
            checkpoints.save(4, {})
    assert names(checkpoints.folder) == ["latest", "step-000002", "step-000003"]


def test_the_position_is_kept_as_it_is(saved: ToyRun) -> None:
    saved.train(4)
    position = {"loss": float("nan"), "low": -0.0, "text": "ä\ud800", "list": [1, 2.5, None], "nested": {"a": True}}
    saved.checkpoints.save(4, position)
    np.testing.assert_equal(saved.checkpoints.resume("latest"), position)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM"])
def test_accelerators_whose_loaders_run_code_are_refused(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType[kind])
    with pytest.raises(ValueError, match=f"accelerator uses {DistributedType[kind].value}, .*use DDP"):
        Checkpoints(accelerator, tmp_path)


def test_the_whole_model_on_one_process_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    with pytest.raises(ValueError, match=r"state_dict_type=FULL_STATE_DICT .* use SHARDED_STATE_DICT"):
        Checkpoints(accelerator, tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_used_folder_is_refused_before_the_loop(saved: ToyRun, folder: Path) -> None:
    fresh = Checkpoints(saved.accelerator, folder)
    with (
        pytest.raises(ValueError, match="holds step-000003, which this run neither saved nor resumed from; resume"),
        fresh.stopping_on_signal(),
    ):
        pytest.fail("trains")


@pytest.mark.usefixtures("saved")
def test_a_second_process_is_told_before_its_loop_and_deletes_no_draft(folder: Path) -> None:
    """Use two open files, which are to `flock` as good as two processes."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    (copy / "step-000004.partial").mkdir()
    second = ToyRun(copy)
    message = rf"{copy}: another process is writing there\. Wait for it or stop it, or choose another folder"
    with FileLock(copy / ".lock"):
        assert_refused(second, "latest", message)
        with pytest.raises(ValueError, match=message), second.checkpoints.stopping_on_signal():
            pytest.fail("trains")
        with pytest.raises(ValueError, match=message):
            second.save()
        assert (copy / "step-000004.partial").is_dir()
    second.resume()


def test_runs_of_one_process_share_the_lock_and_the_last_one_releases_it(tmp_path: Path) -> None:
    first, second = ToyRun(tmp_path), ToyRun(tmp_path)
    first.train(1, save=True)
    second.resume()
    second.train(2, save=True)
    del first
    with pytest.raises(Timeout):
        FileLock(tmp_path / ".lock", blocking=False).acquire()
    del second
    FileLock(tmp_path / ".lock", blocking=False).acquire()
