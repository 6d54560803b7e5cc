"""Tests that a manifest holds for the saved files: each change to it, or to a listed file, is found and named."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_memopt.checkpoint.files import (
    MANIFEST,
    checkpoint_name,
    files_below,
    is_checkpoint_name,
    list_files,
    read_manifest,
    read_regular,
    render,
    verify_files,
)

HEADER = {"step": 7, "run": "a run", "position": {"loss": 0.5, "text": "ä"}, "launch": {"device": "cpu"}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two files, one in a folder of its own, and their manifest."""
    folder = tmp_path / "step-000007"
    (folder / "inner").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "weights").write_bytes(b"weights")
    (folder / "inner" / "state").write_bytes(b"state")
    (folder / MANIFEST).write_bytes(render({**HEADER, "files": list_files(folder)}))
    return folder


def test_names_of_steps() -> None:
    assert [checkpoint_name(step) for step in (0, 120, 12_345_678)] == ["step-000000", "step-000120", "step-12345678"]
    assert all(is_checkpoint_name(checkpoint_name(step)) for step in (0, 120, 12_345_678))
    others = ("step-12", "step-000120.partial", "step-000120.removed", "step-00012x", "step--00001", "latest", "")
    assert not any(is_checkpoint_name(name) for name in others)


def test_a_manifest_is_read_as_it_was_written(checkpoint: Path) -> None:
    assert set(list_files(checkpoint)) == {"inner/state", "weights", MANIFEST}
    manifest = verify_files(checkpoint)
    assert manifest == read_manifest(checkpoint)
    assert {name: manifest[name] for name in HEADER} == HEADER
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {"inner/state": 5, "weights": 7}
    # Wherever the folder goes, under a name that is no step's.
    assert verify_files(checkpoint.rename(checkpoint.with_name("copy"))) == manifest


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a manifest with another content and a right digest."""

    def write(checkpoint: Path) -> None:
        manifest = read_manifest(checkpoint)
        change(manifest)
        (checkpoint / MANIFEST).write_bytes(render(manifest))

    return write


def replaced(content: str) -> Callable[[Path], int]:
    return lambda checkpoint: (checkpoint / MANIFEST).write_text(content)


def edited(old: str, new: str) -> Callable[[Path], None]:
    """Return a manifest with another content and the old digest."""

    def edit(checkpoint: Path) -> None:
        written = (checkpoint / MANIFEST).read_text()
        assert written.count(old) == 1
        (checkpoint / MANIFEST).write_text(written.replace(old, new))

    return edit


def link(checkpoint: Path) -> None:
    checkpoint.symlink_to(checkpoint.rename(checkpoint.with_name("elsewhere")))


def turn_into_pipe(checkpoint: Path) -> None:
    """Make a pipe without a writer."""
    (checkpoint / "weights").unlink()
    os.mkfifo(checkpoint / "weights")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda checkpoint: (checkpoint / MANIFEST).unlink(), r"manifest\.json is missing from .*/step-000007$"),
        (replaced("{"), r"manifest\.json is damaged: Expecting property name"),
        (replaced("[1]"), r"manifest\.json is damaged: 'str' object cannot be interpreted"),
        (replaced("{}"), r"manifest\.json is damaged: 'sha256'"),
        (replaced('"text"'), r"manifest\.json is damaged: 'str' object has no attribute 'pop'"),
        (changed(lambda manifest: manifest.pop("step")), r"manifest\.json is damaged: 'step'"),
        (changed(lambda manifest: manifest.update(step="7")), r"manifest\.json is damaged: "),
        (changed(lambda manifest: manifest.update(run=None)), r"manifest\.json is damaged: run is not of type str"),
        (changed(lambda manifest: manifest.pop("position")), r"manifest\.json is damaged: 'position'"),
        (
            changed(lambda manifest: manifest.update(launch=[])),
            r"manifest\.json is damaged: launch is not of type dict",
        ),
        (changed(lambda manifest: manifest.update(files=[])), r"manifest\.json is damaged: files is not of type dict"),
        (changed(lambda manifest: manifest["files"].update(weights=7)), "damaged: files: weights lacks its bytes or"),
        (changed(lambda manifest: manifest["files"]["weights"].pop("sha256")), "damaged: files: weights lacks its"),
        (edited("0.5", "0.25"), r"manifest\.json was changed after it had been written"),
        (edited('"cpu"', '"cpu" '), r"manifest\.json was changed after it had been written"),
        (changed(lambda manifest: manifest.update(step=8)), r"is that of step-000008: another checkpoint has been put"),
        (link, "it is a symbolic link; name the folder that it leads to"),
        (lambda checkpoint: (checkpoint / "weights").unlink(), "^weights is missing$"),
        (lambda checkpoint: shutil.rmtree(checkpoint / "inner"), "^inner/state is missing$"),
        (lambda checkpoint: (checkpoint / "inner" / "x").touch(), "^inner/x is not part of it; remove that file$"),
        (lambda checkpoint: (checkpoint / "weights").write_text("w"), "^weights has 1 bytes instead of 7$"),
        (lambda checkpoint: (checkpoint / "weights").write_text("WEIGHTS"), r"^weights differs from what was .*sha256"),
        (turn_into_pipe, "^weights is not a regular file$"),
    ],
)
def test_damage_is_named(damage: Callable[[Path], Any], message: str, checkpoint: Path) -> None:
    damage(checkpoint)
    with pytest.raises(ValueError, match=message) as refused:
        verify_files(checkpoint)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("target", ["weights", "nothing"])
def test_a_link_that_leads_nowhere_is_named(target: str, checkpoint: Path) -> None:
    (checkpoint / "weights").unlink()
    (checkpoint / "weights").symlink_to(target)
    with pytest.raises(ValueError, match=r"^weights cannot be read: (Too many levels|No such file)"):
        verify_files(checkpoint)


def test_all_but_folders_is_listed_in_order(tmp_path: Path) -> None:
    for name in ("b", "a/c", "a/d/e"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "z").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    found = [file.relative_to(tmp_path).as_posix() for file in files_below(tmp_path)]
    assert found == ["a/c", "a/d/e", "b", "pipe", "z"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"\x00text")
    assert [read_regular(tmp_path / name) for name in ("pipe", "folder", "missing")] == [None, None, None]
    assert read_regular(tmp_path / "file") == b"\x00text"
    with pytest.raises(ValueError, match=r"cannot be read: File name too long$"):
        read_regular(tmp_path / ("x" * 300))
