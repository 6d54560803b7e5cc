"""Checkpoints that are not resumed: they would run code, are another run's, or cannot be set here; saves that fail."""

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from toy_run import ToyRun

from hf_memopt.checkpoint import Checkpoints, checkpoints, files
from hf_memopt.checkpoint.manifest import MANIFEST, list_files, read_manifest, render
from hf_memopt.disk.locks import WriterLock

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


@pytest.fixture
def folder(saved: ToyRun) -> Path:
    return saved.checkpoints.folder


def assert_refused(run: ToyRun, name: str | Path, message: str) -> None:
    before = run.state()
    with pytest.raises(ValueError, match=message) as refused:
        run.resume(name)
    assert "\n" not in str(refused.value)
    assert run.state() == before


# ------------------------------------------------------------------------------------------------ code


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._trace),)


def forge(checkpoint: Path, name: str, state: Any) -> None:
    """Replace a file, and make manifest and `latest` again, as somebody would who may write there."""
    header = {key: value for key, value in read_manifest(checkpoint).items() if key != "files"}
    torch.save(state, checkpoint / name)
    (checkpoint / MANIFEST).unlink()
    (checkpoint / MANIFEST).write_bytes(render({**header, "files": list_files(checkpoint)}))
    files.point_latest_to(checkpoint)


PICKLES = [
    *("custom_checkpoint_0.pkl", "random_states_0.pkl", "optimizer.bin", "scheduler.bin", "scaler.pt"),
    *("pytorch_model.bin", "sampler.bin", "dl_state_dict.bin"),
]


@pytest.mark.parametrize("name", PICKLES)
def test_no_file_runs_code(name: str, saved: ToyRun, folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    forge(folder / "step-000003", name, {"value": Payload(trace)})
    assert_refused(
        saved, "latest", rf"step-000003/{name} holds more than tensors.*: posix.mkdir, which is not run\. Let"
    )
    assert not trace.exists()


def test_accelerate_runs_it(saved: ToyRun, folder: Path, tmp_path: Path) -> None:
    """What the refusals are for."""
    forge(folder / "step-000003", "custom_checkpoint_0.pkl", {"value": Payload(tmp_path / "trace")})
    saved.accelerator.load_state(str(folder / "step-000003"))
    assert (tmp_path / "trace").is_dir()


@pytest.mark.parametrize("force", [None, "1"])
def test_what_is_put_there_after_the_check_is_not_run_either(
    force: str | None, saved: ToyRun, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        monkeypatch.delenv(name, raising=False)
    if force:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", force)
    before = dict(os.environ)

    def check(checkpoint: Path) -> None:
        torch.save({"value": Payload(tmp_path / "trace")}, checkpoint / "custom_checkpoint_0.pkl")

    monkeypatch.setattr(checkpoints, "check_pickles", check)
    with pytest.raises(Exception, match="Weights only load failed"):
        saved.resume()
    assert not (tmp_path / "trace").exists()
    assert dict(os.environ) == before


class Marker:
    """A user's own class in a state."""


@pytest.fixture
def marked(tmp_path: Path) -> ToyRun:
    run = ToyRun(tmp_path / "marked")
    run.average.value = Marker()  # type: ignore[assignment]
    return run


def test_a_state_that_could_not_be_resumed_is_not_saved(marked: ToyRun) -> None:
    with pytest.raises(
        ValueError, match=r"custom_checkpoint_0.pkl holds more than .*Marker.*torch\.serialization\.add_"
    ):
        marked.save()
    assert not list(marked.checkpoints.folder.glob("step-*"))


def test_classes_that_the_user_allows_are_saved_and_resumed(marked: ToyRun) -> None:
    with torch.serialization.safe_globals([Marker]):
        marked.save()
        marked.average.value = torch.ones(())
        marked.resume()
    assert isinstance(marked.average.value, Marker)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM"])
def test_accelerators_whose_loaders_run_code_are_refused(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType[kind])
    with pytest.raises(ValueError, match=f"accelerator uses {DistributedType[kind].value}, .*use DDP"):
        Checkpoints(accelerator, tmp_path)


# ------------------------------------------------------------------------------------------------ random states


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda states: states.pop(name)


def replaced(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda states: states.update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        *(without(name) for name in ("step", "random_state", "numpy_random_seed", "torch_manual_seed")),
        replaced("random_state", (4, *random.getstate()[1:])),
        replaced("numpy_random_seed", ("PCG64", np.zeros(4, dtype=np.uint32), 0, 0, 0.0)),
        replaced("torch_manual_seed", torch.zeros(16, dtype=torch.uint8)),
    ],
)
def test_random_states_that_cannot_be_set_are_refused(change: Any, saved: ToyRun, folder: Path) -> None:
    """Of other versions, in life. Accelerate passes over them, and dropout draws other masks."""
    file = folder / "step-000003" / "random_states_0.pkl"
    states = torch.load(file, weights_only=False)
    change(states)
    forge(folder / "step-000003", file.name, states)
    assert_refused(
        saved, "latest", rf"{file}: these random states cannot be set here \(\w+: .*; resume with the versions"
    )


# ------------------------------------------------------------------------------------------------ another's checkpoint


@pytest.fixture
def others(saved: ToyRun, tmp_path: Path) -> Path:
    """Folder of another run of as many steps."""
    run = ToyRun(tmp_path / "others", seed=1)
    run.train(3, save=True)
    return run.checkpoints.folder


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


@pytest.mark.parametrize("name", ["x" * 5000, "loop"])
def test_names_that_are_none(name: str, saved: ToyRun, folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    assert_refused(saved, name, f"^checkpoint '{name}'.*; valid in .*: step-000002, step-000003")


# ------------------------------------------------------------------------------------------------ before the work


def test_a_used_folder_is_refused_before_the_loop(saved: ToyRun, folder: Path) -> None:
    fresh = Checkpoints(saved.accelerator, folder)
    with (
        pytest.raises(ValueError, match="holds step-000003, which this run neither saved nor resumed from; resume"),
        fresh.stopping_on_signal(),
    ):
        pytest.fail("trains")


@pytest.mark.parametrize("inside", [True, False])
def test_a_folder_takes_no_other_runs_checkpoint(inside: bool, saved: ToyRun, folder: Path, others: Path) -> None:
    other = others / "step-000002"
    if inside:
        other = shutil.copytree(other, folder / "copy")
    assert_refused(saved, other, rf"{other.name} is none of those in {folder}, which holds step-000003, .* or choose")
    saved.resume()


def test_the_remedy_for_a_damaged_latest_works(saved: ToyRun, folder: Path) -> None:
    """A checkpoint of the same folder can be resumed by its name all the same."""
    (folder / "latest").write_text("step-000001\n")
    assert_refused(saved, "latest", "latest is damaged")
    saved.resume("step-000002")
    assert files.verified(folder, "latest")[1]["step"] == 2


# ------------------------------------------------------------------------------------------------ one writer


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


# ------------------------------------------------------------------------------------------------ disks


def test_a_folder_that_cannot_be_written_is_resumed_while_latest_is_right(
    saved: ToyRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write wherever it likes; hence the pretence."""

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
