"""One process at a time writes a folder, and the runs of one process share its lock."""

import gc
import os
import shutil
from pathlib import Path

import pytest
from refusals import assert_refused
from toy_run import ToyRun

from hf_memopt.checkpoint.folder_lock import lock_of
from hf_memopt.disk.locks import WriterLock

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def assert_held(folder: Path, held: bool) -> None:
    """To `flock`, two open files are as good as two processes."""
    theirs = WriterLock(folder / ".lock", "theirs", "leave")
    if not held:
        with theirs:
            return
    with pytest.raises(ValueError, match="is writing there"):
        theirs.acquire()


def test_all_names_of_a_folder_have_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    lock = lock_of(tmp_path / "run")
    assert all(lock_of(Path(name)) is lock for name in ("run", "./run", "other/../run", "link"))
    assert lock_of(tmp_path / "other") is not lock


def test_a_folder_is_made_and_locked_until_it_is_released(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    lock = lock_of(folder)
    assert not folder.exists()
    lock.acquire()
    lock.acquire()
    assert_held(folder, True)
    lock.release()
    lock.release()
    assert_held(folder, False)


def test_asking_for_a_lock_again_does_not_release_it(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    lock.acquire()
    assert lock_of(tmp_path) is lock
    gc.collect()
    assert_held(tmp_path, True)
    del lock
    assert_held(tmp_path, False)


def test_what_another_process_holds_is_named_with_a_remedy(tmp_path: Path) -> None:
    message = rf"^{tmp_path}: process {os.getpid()} on .* is writing there\. .*, or choose another folder$"
    with WriterLock(tmp_path / ".lock", "theirs", "leave"), pytest.raises(ValueError, match=message):
        lock_of(tmp_path).acquire()


@pytest.mark.usefixtures("saved")
def test_a_second_process_is_told_before_its_loop_and_deletes_no_draft(folder: Path) -> None:
    """To `flock`, two open files are as good as two processes."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".lock"))
    (copy / "step-000004.partial").mkdir()
    second = ToyRun(copy)
    message = (
        rf"{copy}: process {os.getpid()} on .* is writing there\. Wait for it or stop it, or choose another folder"
    )
    with WriterLock(copy / ".lock", "theirs", "leave"):
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
    assert (tmp_path / ".lock").exists()
    del second
    assert not (tmp_path / ".lock").exists()
