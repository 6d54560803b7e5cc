"""Tests of `attach(trainer, frozen=...)` with TRL's frozen models."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import Tensor, nn

callbacks = LateModule("hf_memopt.callbacks")
frozen_models = LateModule("hf_memopt.callbacks.frozen_models")
every_trainer = LateModule("hf_memopt.callbacks.every_trainer")
toys = LateModule("frozen_trainers")

pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")

REWARDS = ["reward_funcs[0]", "reward_funcs[2]"]
NAMES = {
    "dpo": ["ref_model"],
    "kto": ["ref_model"],
    "grpo": ["ref_model", *REWARDS],
    "rloo": ["ref_model", *REWARDS],
    "gkd": ["teacher_model"],
    "gold": ["teacher_model"],
}


def weights_after(trainer: Any) -> list[Tensor]:
    torch.manual_seed(1)  # for random completions
    trainer.train()
    return [parameter.detach() for parameter in trainer.model.parameters()]


def launched(kind: str, folder: Path, *, lora: bool = False, **flags: Any) -> Any:
    """Return a trainer that a script makes under `hf-memopt launch`."""
    settings = {"offload": "off", "memory_log": False, **flags}
    with every_trainer.attached(callbacks.MemoptArguments(**settings)):
        return getattr(toys, kind)(folder, **{"lora": True} if lora else {})


def frozen_part(trainer: Any) -> Any:
    (part,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, frozen_models.FrozenModels))
    return part


@pytest.mark.sweep(share=0.1)
@pytest.mark.parametrize("mode", ["swap", "stream"])
@pytest.mark.parametrize("how", ["attach", "launch"])
@pytest.mark.parametrize("kind", NAMES)
def test_weights_are_bitwise_those_of_the_plain_run(
    kind: str, how: str, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hf_memopt")
    want = weights_after(getattr(toys, kind)(tmp_path))
    if how == "launch":
        trainer = launched(kind, tmp_path, frozen=mode)
    else:
        trainer = getattr(toys, kind)(tmp_path)
        callbacks.attach(trainer, offloader=None, memory=False, frozen=mode)
    assert all(map(torch.equal, weights_after(trainer), want))
    part = frozen_part(trainer)
    assert list(part.visits) == NAMES[kind]
    assert f"frozen='{mode}': {', '.join(f'{name} ({mode})' for name in NAMES[kind])}" in caplog.messages
    for name, visits in part.visits.items():
        report = visits.teacher.report()
        assert (report.mode, report.home) == (mode, "cpu")
        assert report.bytes_host_to_device >= 3 * report.host_bytes > 0
        assert f"{name} as teacher: {mode} on cpu" in caplog.text


def test_weights_in_files_are_read_from_the_folder_that_they_were_loaded_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.safetensors").write_text("in the working folder, and no model's")
    monkeypatch.chdir(tmp_path)
    want = weights_after(toys.grpo(tmp_path))
    trainer = toys.grpo(tmp_path)
    callbacks.attach(trainer, offloader=None, memory=False, frozen="stream", frozen_home="file")
    assert all(map(torch.equal, weights_after(trainer), want))
    part = trainer.callback_handler.callbacks[-1]
    read = {}
    for name, visits in part.visits.items():
        report = visits.teacher.report()
        assert report.home == "file"
        assert report.bytes_read >= report.file_bytes > 0
        read[name] = {Path(file.name).name for file in visits.teacher._at_home._block.files}
    assert "model.safetensors" in read["ref_model"]
    assert "model.safetensors" not in read["reward_funcs[0]"]  # was made in memory


def test_weights_that_are_frozen_in_the_policy_are_held_once(tmp_path: Path) -> None:
    trainer = toys.dpo(tmp_path)
    layer = sum(parameter.nbytes for parameter in trainer.model.model.layers[0].parameters())
    callbacks.attach(trainer, offloader=None, memory=False, frozen="swap")
    part = trainer.callback_handler.callbacks[-1]
    report = part.visits["ref_model"].teacher.report()
    assert report.shared_bytes == layer
    assert report.host_bytes >= sum(each.nbytes for each in trainer.model.parameters()) - layer


def test_what_was_attached_can_be_removed(tmp_path: Path) -> None:
    trainer = toys.dpo(tmp_path)
    num_callbacks = len(trainer.callback_handler.callbacks)
    handle = callbacks.attach(trainer, offloader=None, memory=False, frozen="swap")
    part = trainer.callback_handler.callbacks[-1]
    handle.remove()
    trainer.train()
    assert part.visits["ref_model"].teacher.report().bytes_host_to_device == 0
    assert len(trainer.callback_handler.callbacks) == num_callbacks


def stand_in(**attributes: Any) -> Any:
    handler = SimpleNamespace(callbacks=attributes.pop("callbacks", []))
    engines = {"is_deepspeed_enabled": False, "is_fsdp_enabled": False}
    return SimpleNamespace(**{"model": nn.Linear(2, 2), "callback_handler": handler, **engines, **attributes})


def shares_its_model() -> Any:
    student = nn.Linear(2, 2)
    return stand_in(model=student, teacher_model=student)


class DistillationTrainer(SimpleNamespace):
    pass


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing is frozen": (stand_in, "has no ref_model, teacher_model or reward model of its own; leave frozen out"),
    "the model teaches itself": (shares_its_model, "of its own"),
    "a function rewards": (lambda: stand_in(reward_funcs=[len]), "of its own"),
    "deepspeed": (lambda: stand_in(ref_model=nn.Linear(2, 2), is_deepspeed_enabled=True), "places ref_model .*already"),
    "fsdp": (lambda: stand_in(ref_model=nn.Linear(2, 2), is_fsdp_enabled=True), "places ref_model .*already"),
    "distillation": (
        lambda: DistillationTrainer(**vars(stand_in(teacher_model=nn.Linear(2, 2)))),
        "reads the output layer of teacher_model between calls",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_trainers_whose_frozen_models_cannot_move_are_refused(kind: str) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(ValueError, match=f"^frozen='swap': .*{reason}"):
        frozen_models.FrozenModels(make(), "swap")


NO_SECOND_MODEL = "its reference is the model that learns without the adapters, which takes no more memory"


def test_the_refusal_names_the_flag_for_a_base_with_adapters(tmp_path: Path) -> None:
    trainer = launched("dpo", tmp_path, lora=True, frozen="swap")
    with pytest.raises(ValueError, match=f"{NO_SECOND_MODEL}; leave frozen out; base='host' is for the frozen weights"):
        trainer.train()


def test_reward_models_beside_adapters_are_taken_and_the_reference_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hf_memopt")
    trainer = launched("grpo", tmp_path, lora=True, frozen="swap")
    trainer.train()
    assert f"frozen='swap': reward_funcs[0] (swap), reward_funcs[2] (swap); {NO_SECOND_MODEL}" in caplog.messages


def test_a_trainer_without_a_reference_says_that_it_needs_none(tmp_path: Path) -> None:
    trainer = toys.dpo(tmp_path)
    trainer.ref_model = None  # as after precompute_ref_log_probs
    with pytest.raises(ValueError, match="of its own; it has no reference, which its settings do not need; leave"):
        callbacks.attach(trainer, frozen="swap")


def test_a_reference_that_follows_the_policy_is_refused(tmp_path: Path) -> None:
    trainer = toys.dpo(tmp_path, sync_ref_model=True)
    with pytest.raises(
        ValueError, match=r"SyncRefModelCallback changes the weights of ref_model.*sync_ref_model=False"
    ):
        callbacks.attach(trainer, frozen="swap")
    trainer.train()  # nothing was attached
