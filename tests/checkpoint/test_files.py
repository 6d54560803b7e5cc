"""Tests that checkpoint folders are whole or absent, and found by the given name, whatever the disk does."""

import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import accelerate.utils.other
import pytest
import torch
from refusals import assert_refused
from toy_run import ToyRun

from hf_memopt.checkpoint import Checkpoints, files
from hf_memopt.checkpoint.files import MANIFEST

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


# ------------------------------------------------------------------------------------------------ names


def publish(folder: Path, *steps: int) -> None:
    """Make checkpoints of one file each."""
    folder.mkdir(exist_ok=True)
    for step in steps:
        draft = files.draft_of(folder / f"step-{step:06d}")
        files.begin(draft)
        (draft / "state").write_text(str(step))
        header = {"step": step, "run": "0" * 32, "position": {"step": step}, "launch": {}}
        files.publish(draft, header, folder / f"step-{step:06d}")


def test_what_is_published_is_found_by_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    publish(folder, 1, 2)
    monkeypatch.chdir(tmp_path)
    assert files.find_checkpoint(folder, "latest") == folder / "step-000002"
    for name, number in (("latest", 2), ("step-000001", 1), (folder / "step-000001", 1), ("run/step-000001", 1)):
        found, manifest = files.verified(folder, name)
        assert (found.resolve(), manifest["position"]) == (folder / f"step-00000{number}", {"step": number})


def test_latest_is_not_written_where_it_says_so_already(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    before = (tmp_path / "latest").stat().st_ino
    files.point_latest_to(tmp_path / "step-000002")
    assert (tmp_path / "latest").stat().st_ino == before
    files.point_latest_to(tmp_path / "step-000001")
    assert files.read_latest(tmp_path).name == "step-000001"


def test_the_last_checkpoints_up_to_a_step_stay(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 999_999, 1_000_000)
    for name in ("step-12", "step-000004.partial", "steps", "step-00000x"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000").write_text("no folder")

    def older(step: int, keep_last: int) -> list[str]:
        return [path.name for path in files.older_than(tmp_path, step, keep_last)]

    assert older(999_999, 2) == ["step-000001"]
    assert older(2, 1) == ["step-000001"]
    assert older(1_000_000, 1) == ["step-000001", "step-000002", "step-999999"]
    assert older(999_999, 5) == []


def test_a_folder_is_the_same_under_each_of_its_names(tmp_path: Path) -> None:
    publish(tmp_path / "run", 1)
    (tmp_path / "link").symlink_to("run")
    assert files.is_own(tmp_path / "link", tmp_path / "run" / "step-000001")
    assert not files.is_own(tmp_path, tmp_path / "run" / "step-000001")
    assert not files.is_own(tmp_path, tmp_path / "run")


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


@pytest.mark.parametrize("name", ["x" * 5000, "loop"])
def test_names_that_are_none(name: str, saved: ToyRun, folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    assert_refused(saved, name, f"^checkpoint '{name}'.*; valid in .*: step-000002, step-000003")


@pytest.fixture
def others(saved: ToyRun, tmp_path: Path) -> Path:
    """The folder of another run of as many steps."""
    run = ToyRun(tmp_path / "others", seed=1)
    run.train(3, save=True)
    return run.checkpoints.folder


@pytest.mark.parametrize("inside", [True, False])
def test_a_folder_takes_no_other_runs_checkpoint(inside: bool, saved: ToyRun, folder: Path, others: Path) -> None:
    other = others / "step-000002"
    if inside:
        other = shutil.copytree(other, folder / "copy")
    assert_refused(saved, other, rf"{other.name} is none of those in {folder}, which holds step-000003, .* or choose")
    saved.resume()


def test_the_remedy_for_a_damaged_latest_works(saved: ToyRun, folder: Path) -> None:
    """Resume another checkpoint of the folder by its name."""
    (folder / "latest").write_text("step-000001\n")
    assert_refused(saved, "latest", "latest is damaged")
    saved.resume("step-000002")
    assert files.verified(folder, "latest")[1]["step"] == 2


@pytest.mark.parametrize("name", ["latest", "manifest", "weights"])
@pytest.mark.parametrize("damage", ["loop", "dangling", "nested", "pipe"])
def test_what_cannot_be_read_is_said_in_one_line(name: str, damage: str, saved: ToyRun, folder: Path) -> None:
    checkpoint = folder / "step-000003"
    file = {
        "latest": folder / "latest",
        "manifest": checkpoint / MANIFEST,
        "weights": checkpoint / "model.safetensors",
    }[name]
    file.unlink()
    if damage == "nested":
        file.write_text("[" * 100_000 + "]" * 100_000)
    elif damage == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(file.name if damage == "loop" else "nothing")
    assert saved.checkpoints.has_latest
    assert_refused(saved, "latest", rf"{file.name} .*; valid in .*: step-000002")


# ------------------------------------------------------------------------------------------------ disks


def test_a_folder_that_cannot_be_written_is_resumed_while_latest_is_right(
    saved: ToyRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pretend: root may write anywhere."""

    def refuse(file: Path, content: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(Path, "write_text", refuse)
    saved.resume()
    saved.resume("step-000003")
    with pytest.raises(
        OSError, match=rf"{folder}/latest could not be written: .*Read-only file system.*bytes free"
    ) as error:
        saved.resume("step-000002")
    assert error.value.errno == errno.EROFS


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (PermissionError(errno.EACCES, "Permission denied"), errno.EACCES),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0\nmore"), errno.ENOSPC),
    ],
)
def test_a_save_that_fails_names_path_and_bytes(
    error: Exception, code: int, saved: ToyRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.train(4)
    usage = shutil.disk_usage(folder)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "save", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1024))
    message = (
        rf"step-000004\.partial could not be written: .*{os.strerror(code)}.* 1,024 bytes free, and a checkpoint takes "
        r"\d\d,\d{3} or more\. Make room.* what 'latest' named is still there$"
    )
    with pytest.raises(OSError, match=message) as caught:
        saved.save()
    assert caught.value.errno == code
    assert "\n" not in str(caught.value)
    assert files.verified(folder, "latest")[1]["step"] == 3


class FullDisk:
    """A disk that fails the k-th of all calls that write, some of them after having written a part."""

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


@pytest.mark.e2e
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
        run.save()
        run.train(save=True)
        assert run.state() == uninterrupted
        shutil.rmtree(folder)
        shutil.copytree(pristine, folder)
    assert num_faults == num_calls > 20


def save_on_a_disk_that_fails(run: ToyRun, at: int) -> int:
    """Return the number of writes, or 0 if saving failed."""
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
    """Check the order of calls, since a test can have no power failure."""
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
