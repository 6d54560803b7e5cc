"""Canaries of checkpoints in accelerate, safetensors and torch's loaders."""

import inspect
import os
import pickle
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from accelerate.utils import DataLoaderConfiguration, load, save
from accelerate.utils.constants import SCALER_NAME
from reliance import relied_on_by
from torch import nn
from torch.utils.data import DataLoader

CHECKPOINTS = "hf_memopt/checkpoint/checkpoints.py"
FILES = "hf_memopt/checkpoint/files.py"
STATES = "hf_memopt/checkpoint/states.py"
BATCHES = "hf_memopt/checkpoint/batches.py"


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Accelerator, Path]:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(64, 64))
    accelerator.save_state(str(tmp_path))
    return accelerator, tmp_path


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_changed_bit_of_the_weights_loads_without_a_word(saved: tuple[Accelerator, Path]) -> None:
    """Watch the reason for the weights' manifest."""
    with relied_on_by(FILES):
        accelerator, folder = saved
        (model,) = accelerator._models
        before = {name: value.clone() for name, value in model.state_dict().items()}
        flip_last_byte(folder / "model.safetensors")
        accelerator.load_state(str(folder))
        assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_random_states_that_cannot_be_loaded_are_passed_over(saved: tuple[Accelerator, Path]) -> None:
    """Watch the reason for checking random states first, and for refusing other numbers of processes or devices."""
    with relied_on_by(STATES):
        accelerator, folder = saved
        (folder / "random_states_0.pkl").unlink()
        before = torch.get_rng_state()
        accelerator.load_state(str(folder))
        assert torch.equal(torch.get_rng_state(), before)


def test_random_states_are_saved_under_these_names(saved: tuple[Accelerator, Path]) -> None:
    with relied_on_by(STATES):
        states = load(saved[1] / "random_states_0.pkl")
        assert {"step", "random_state", "numpy_random_seed", "torch_manual_seed"} <= states.keys()
        source = inspect.getsource(save_accelerator_state)
        for device in ("cuda", "xpu"):
            assert f'states["torch_{device}_manual_seed"] = torch.{device}.get_rng_state_all()' in source


class MakesFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)

    def state_dict(self) -> Any:
        return self

    def load_state_dict(self, state: Any) -> None:
        pass


def test_states_of_registered_objects_run_code_unless_torch_is_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watch that the variable overrides accelerate's `weights_only=False`."""
    with relied_on_by(STATES):
        accelerator = Accelerator(cpu=True)
        accelerator.register_for_checkpointing(MakesFolder(tmp_path / "made"))
        accelerator.save_state(str(tmp_path / "state"))
        with monkeypatch.context() as patch:
            patch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
            with pytest.raises(pickle.UnpicklingError, match=r"GLOBAL posix\.mkdir"):
                accelerator.load_state(str(tmp_path / "state"))
        assert not (tmp_path / "made").exists()
        accelerator.load_state(str(tmp_path / "state"))
        assert (tmp_path / "made").exists()


def test_accelerate_unpickles_eight_kinds_of_files() -> None:
    """Watch bin, pkl, pt: weights, optimizers, schedules, samplers, loaders, scaler, random and registered states."""
    with relied_on_by(STATES):
        source = inspect.getsource(load_accelerator_state) + inspect.getsource(load_custom_state)
        assert len(re.findall(r"[ (]load\(", source)) == 8
        assert Path(SCALER_NAME).suffix == ".pt"


def test_weights_are_written_for_their_owner_alone(saved: tuple[Accelerator, Path]) -> None:
    with relied_on_by(FILES):
        assert stat.S_IMODE((saved[1] / "model.safetensors").stat().st_mode) == 0o600


def test_a_missing_optimizer_is_noticed_when_the_model_is_overwritten(tmp_path: Path) -> None:
    """Watch the reason for verifying all files before the first is loaded."""
    with relied_on_by(CHECKPOINTS):
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(2, 2)
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.save_state(str(tmp_path))
        saved = model.weight.detach().clone()
        with torch.no_grad():
            model.weight += 1
        (tmp_path / "optimizer.bin").unlink()
        with pytest.raises(FileNotFoundError):
            accelerator.load_state(str(tmp_path))
        assert torch.equal(model.weight, saved)


def test_neither_epoch_nor_position_in_the_data_is_saved(tmp_path: Path) -> None:
    with relied_on_by(BATCHES):
        accelerator, loader = shuffled(use_seedable_sampler=True)
        accelerator.save_state(str(tmp_path))
        files = {path.name for path in tmp_path.iterdir()}
        assert files == {"random_states_0.pkl"}
        loader.set_epoch(3)
        accelerator.load_state(str(tmp_path))
        assert loader.iteration == 3


def test_registered_objects_are_saved_by_the_main_process() -> None:
    """Watch a statement of the docstring of Checkpoints."""
    with relied_on_by(CHECKPOINTS):
        assert "save_on_each_node=save_on_each_node" in inspect.getsource(save_custom_state)
        assert "is_main_process" in inspect.getsource(save)


def test_each_iterator_draws_a_seed_from_the_loaders_generator_or_the_global_one() -> None:
    with relied_on_by(BATCHES):
        before = torch.get_rng_state()
        list(DataLoader(torch.arange(3), generator=torch.Generator()))
        assert torch.equal(torch.get_rng_state(), before)
        list(DataLoader(torch.arange(3)))
        assert not torch.equal(torch.get_rng_state(), before)


def test_a_batch_is_read_ahead() -> None:
    """Watch the reason for not restoring datasets' draws from global generators."""
    with relied_on_by(BATCHES):
        read: list[int] = []

        class Counted(torch.utils.data.Dataset[int]):
            def __len__(self) -> int:
                return 3

            def __getitem__(self, index: int) -> int:
                read.append(index)
                return index

        next(iter(Accelerator(cpu=True).prepare(DataLoader(Counted()))))
        assert read == [0, 1]


def test_the_order_is_decided_by_seed_and_epoch_where_the_sampler_is_seedable() -> None:
    with relied_on_by(BATCHES):
        _, plain = shuffled()
        assert not isinstance(get_sampler(plain), SeedableRandomSampler)
        _, loader = shuffled(use_seedable_sampler=True, data_seed=5)
        assert isinstance(get_sampler(loader), SeedableRandomSampler)
        orders = []
        for epoch in (0, 1, 0):
            loader.generator.manual_seed(9)
            loader.set_epoch(epoch)
            orders.append([batch.tolist() for batch in loader])
        assert orders[0] == orders[2] != orders[1]


def test_skipped_batches_are_not_read_and_the_rest_keeps_its_order() -> None:
    with relied_on_by(BATCHES):
        accelerator, loader = shuffled(use_seedable_sampler=True)
        loader.set_epoch(2)
        whole = [batch.tolist() for batch in loader]
        loader.set_epoch(2)
        assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, 3)] == whole[3:]


def shuffled(**settings: Any) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
    loader = DataLoader(torch.arange(20), 2, shuffle=True, generator=torch.Generator())
    return accelerator, accelerator.prepare(loader)
