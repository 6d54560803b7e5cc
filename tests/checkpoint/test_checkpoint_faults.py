"""Checkpoints that were damaged, interrupted or had no room: `latest` stays valid, and nothing else is loaded."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate.utils.other
import pytest
import torch
from patience import HANG_S
from toy_run import ToyRun

from hf_memopt.checkpoint import Checkpoints, files

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The state in which a run ends that neither saves nor stops."""
    run = ToyRun(tmp_path_factory.mktemp("uninterrupted"))
    run.train()
    return run.state()


def test_refusals_without_a_valid_checkpoint(saved: ToyRun, tmp_path: Path) -> None:
    nowhere = Checkpoints(saved.accelerator, tmp_path / "nowhere")
    assert not nowhere.has_latest
    with pytest.raises(ValueError, match=r"checkpoint 'latest': .*nowhere has no file of that name; there is no valid"):
        nowhere.resume("latest")
    with pytest.raises(ValueError, match="checkpoint 'step-000009': no such folder, and none in"):
        saved.checkpoints.resume("step-000009")
    (saved.checkpoints.folder / "latest").unlink()
    with pytest.raises(ValueError, match=r"valid in .*: step-000002, step-000003"):
        saved.checkpoints.resume("latest")


class FullDisk:
    """Fails the k-th call of all those that write, some of them after having written a part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
        self.num_calls = 0
        self._fails_at = fails_at
        for name in ("write_bytes", "write_text", "mkdir", "rename", "replace"):
            self._wrap(monkeypatch, Path, name)
        for owner, name in ((torch, "save"), (accelerate.utils.other, "safe_save_file"), (os, "fsync")):
            self._wrap(monkeypatch, owner, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        write = getattr(owner, name)

        def writing(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self._fails_at:
                if name in ("save", "safe_save_file", "write_bytes", "write_text"):
                    file = next(each for each in args if isinstance(each, str | Path))
                    with open(file, "wb") as opened:
                        opened.write(b"a part")
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*args, **kwargs)

        monkeypatch.setattr(owner, name, writing)


def test_a_full_disk_at_any_write_leaves_the_checkpoint_before(saved: ToyRun, uninterrupted: dict[str, Any]) -> None:
    folder = saved.checkpoints.folder
    pristine = folder.with_name("pristine")
    shutil.copytree(folder, pristine)
    for num_faults in itertools.count():
        run = ToyRun(folder)
        run.resume()
        run.train(4)
        if num_calls := save_on_a_disk_that_fails(run, at=num_faults + 1):
            break
        assert files.verified(folder, "latest")[1]["step"] in (3, 4)
        assert not list(folder.glob("step-*.partial"))
        files.verified(folder, "step-000003")
        run.save()  # once there is room again
        run.train(save=True)
        assert run.state() == uninterrupted
        shutil.rmtree(folder)
        shutil.copytree(pristine, folder)
    assert num_faults == num_calls > 20


def save_on_a_disk_that_fails(run: ToyRun, at: int) -> int:
    """How many writes saving took; 0 where it failed."""
    with pytest.MonkeyPatch.context() as patched:
        disk = FullDisk(patched, at)
        try:
            run.save()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return 0
        return disk.num_calls


def test_contents_reach_the_disk_before_names_and_names_before_anything_is_removed(
    saved: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure cannot be had in a test; the order of the calls can."""
    folder = saved.checkpoints.folder
    saved.train(4)
    events: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def note(kind: str, path: str | Path) -> None:
        events.append(f"{kind} {Path(path).relative_to(folder)}")

    def note_sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path != folder.parent:
            note("sync", path)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", lambda self, target: (note("rename", self), rename(self, target)))
    monkeypatch.setattr(Path, "replace", lambda self, target: (note("replace", self), replace(self, target)))
    saved.save()
    contents = sorted(path.name for path in (folder / "step-000004").iterdir() if path.name != "manifest.json")
    assert len(contents) > 5
    draft = "step-000004.partial"
    assert events == [
        *(f"sync {draft}/{name}" for name in contents),
        f"sync {draft}/manifest.json",
        f"sync {draft}",
        f"rename {draft}",
        "sync .",
        "sync latest.partial",
        "replace latest.partial",
        "sync .",
        "rename step-000002",
    ]


@pytest.fixture(scope="module", params=[(50, 10, 0), pytest.param((200, 60, 1), marks=pytest.mark.slow)], ids=str)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of so many processes that were killed at random moments, and of some whose files could not grow.

    The parameters: how many kills, how many of them in the middle of a save, and the seed.
    """
    num_kills, num_wanted, _ = request.param
    script, folder = Path(__file__).parents[1] / "killed_saves.py", tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(script), str(folder), *map(str, request.param)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # forks of a process with more threads can hang
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S, env=environment)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["num_loaded"] >= num_kills
    assert result["num_in_the_middle"] >= num_wanted
    return result


def test_latest_loads_after_every_kill(killed: dict[str, Any]) -> None:
    assert killed["num_lost"] == 0  # of the saves that the process knew to be complete
    assert killed["state_is_that_of_an_uninterrupted_run"]


def test_latest_loads_after_every_write_beyond_the_limit(killed: dict[str, Any]) -> None:
    assert len(killed["errors"]) > 5
    assert all("step-000003.partial could not be written: " in error for error in killed["errors"])
    assert killed["state_after_errors_is_that_of_an_uninterrupted_run"]
