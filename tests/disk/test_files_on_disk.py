"""Tests that files get their names when whole and on disk, and that errors say which write failed."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from hf_memopt.disk.files_on_disk import new_folder, not_written, put_in_place


def test_contents_are_on_disk_before_the_name_and_the_name_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, file = tmp_path / "draft", tmp_path / "file"
    draft.write_text("new")
    file.write_text("old")
    synced: list[tuple[str, str]] = []

    def note(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, file.read_text()))

    monkeypatch.setattr(os, "fsync", note)
    put_in_place(draft, file)
    assert synced == [("draft", "old"), (tmp_path.name, "new")]
    assert not draft.exists()


@pytest.mark.parametrize(
    ("error", "needed_bytes", "code"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), 0, errno.EACCES),
        (RuntimeError("unexpected pos 64 vs 0\nmore"), 2000, errno.ENOSPC),
        (RuntimeError("unexpected pos 64 vs 0\nmore"), 10, errno.EIO),
    ],
)
def test_an_error_names_the_file_and_the_room_on_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, needed_bytes: int, code: int
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1024))
    found = not_written(tmp_path / "missing" / "file", error, ". Make room", needed_bytes)
    assert found.errno == code
    assert os.strerror(code) in str(found)
    assert str(found).endswith("its disk has 1,024 bytes free. Make room")
    assert "\n" not in str(found)


def test_new_folder_disappears_on_an_interrupt(tmp_path: Path) -> None:
    def write_and_interrupt() -> None:
        with new_folder(tmp_path / "deep" / "output") as draft:
            (draft / "half").write_text("written")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_interrupt()
    assert list((tmp_path / "deep").iterdir()) == []
