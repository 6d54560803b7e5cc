"""Tests that unpickling a checkpoint runs no code, and that random states are set or refused."""

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import assert_refused
from torch.distributed import checkpoint as dcp
from toy_run import ToyRun

from hf_memopt.checkpoint import checkpoints, files
from hf_memopt.checkpoint.files import MANIFEST, list_files, read_manifest, render
from hf_memopt.checkpoint.states import check_pickles, check_random_states, weights_only

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


# ------------------------------------------------------------------------------------------------ code


class Payload:
    """An object that makes a folder when unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._trace),)


def forge(checkpoint: Path, name: str, state: Any) -> None:
    """Replace a file, and make manifest and `latest` again, as an attacker with write access would."""
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
        saved, "latest", rf"step-000003/{name} holds more than tensors.*: posix.mkdir, whose code is not run\. Let"
    )
    assert not trace.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_index_of_shards_runs_code(tmp_path: Path) -> None:
    """Attack `.metadata`, which torch.distributed.checkpoint unpickles without a check of its own."""
    shards, trace = tmp_path / "optimizer_0", tmp_path / "trace"
    dcp.save({"weight": torch.ones(3), "step": 1}, checkpoint_id=shards, no_dist=True)
    check_pickles(tmp_path)
    for forged in (Payload(trace), {"planner_data": Payload(trace)}, b"nothing"):
        (shards / ".metadata").write_bytes(forged if isinstance(forged, bytes) else pickle.dumps(forged))
        with pytest.raises(ValueError, match=r"optimizer_0/\.metadata is not what torch.* writes"):
            check_pickles(tmp_path)
    assert not trace.exists()


def test_accelerate_runs_it(saved: ToyRun, folder: Path, tmp_path: Path) -> None:
    """Show the reason for the refusals."""
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


@pytest.mark.parametrize(
    "before", [{}, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "0"}, {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}]
)
def test_torchs_switches_are_as_before_whatever_is_raised(
    before: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    torch.save(Payload(tmp_path / "trace"), tmp_path / "state.pt")
    whole = dict(os.environ)
    with pytest.raises(Exception, match="Weights only load failed"), weights_only():
        torch.load(tmp_path / "state.pt", weights_only=False)
    assert dict(os.environ) == whole
    assert not (tmp_path / "trace").exists()


def test_what_nobody_unpickles_is_not_looked_at(tmp_path: Path) -> None:
    for name in ("model.safetensors", "trainer_state.json", "notes.txt"):
        (tmp_path / name).write_bytes(b"anything")
    check_pickles(tmp_path)
    for name in ("optimizer.bin", "random_states_0.pkl", "scaler.pt"):
        (tmp_path / name).write_bytes(b"anything")
        with pytest.raises(ValueError, match=rf"^{tmp_path}/{name} is not what torch\.save writes: \w+: "):
            check_pickles(tmp_path)
        (tmp_path / name).unlink()


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
    """Take states of other versions: Accelerate passes over them, and dropout would draw other masks."""
    file = folder / "step-000003" / "random_states_0.pkl"
    states = torch.load(file, weights_only=False)
    change(states)
    forge(folder / "step-000003", file.name, states)
    assert_refused(
        saved, "latest", rf"{file}: these random states cannot be set here \(\w+: .*; resume with the versions"
    )


@pytest.mark.parametrize(
    ("process_index", "device", "message"),
    [
        (1, "cpu", r"random_states_1\.pkl is not what torch\.save writes: FileNotFoundError"),
        (0, "cuda", r"random_states_0\.pkl: .* \(KeyError: 'torch_cuda_manual_seed'\)"),
        (0, "xpu:1", r"random_states_0\.pkl: .* \(KeyError: 'torch_xpu_manual_seed'\)"),
    ],
)
def test_states_of_another_process_or_device_are_missing(
    process_index: int, device: str, message: str, folder: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        check_random_states(folder / "step-000003", process_index, torch.device(device))


def test_trying_random_states_draws_nothing_and_sets_nothing(saved: ToyRun, folder: Path) -> None:
    before = saved.state()
    check_random_states(folder / "step-000002", 0, torch.device("cpu"))
    assert saved.state() == before
