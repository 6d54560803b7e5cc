"""Tests of `attach(trainer, frozen=...)` with TRL's frozen models."""

import copy
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
attach_module = LateModule("hf_memopt.callbacks.attach")
transformers = LateModule("transformers")
trl = LateModule("trl")
dpo_script = LateModule("hf_memopt.recipes.by_feature.trainers.dpo")

STEPS: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(seed: int, model_class: str = "LlamaForCausalLM", **options: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(dpo_script.WORDS), pad_token_id=0, bos_token_id=1, eos_token_id=1, **SIZES, **options
    )
    return getattr(transformers, model_class)(config)


def rows(*columns: str) -> Any:
    from datasets import Dataset

    count = dpo_script.COUNT
    texts = [
        {"prompt": f"then comes {count[i]}", "chosen": f" {count[i + 1]}", "rejected": f" {count[i - 1]}"}
        for i in range(4)
    ]
    return Dataset.from_list([{name: row[name] for name in columns} for row in texts * 4])


def dpo(folder: Path, **options: Any) -> Any:
    policy = llama(0)
    for parameter in policy.model.layers[0].parameters():
        parameter.requires_grad_(False)  # so that policy and reference share the layer
    return trl.DPOTrainer(
        policy,
        ref_model=copy.deepcopy(policy),
        args=trl.DPOConfig(str(folder), **STEPS, **options),
        train_dataset=rows("prompt", "chosen", "rejected"),
        processing_class=dpo_script.make_tokenizer(),
    )


def grpo(folder: Path, **options: Any) -> Any:
    tokenizer = dpo_script.make_tokenizer()
    tokenizer.padding_side = "left"
    settings = {"num_generations": 4, "max_completion_length": 4, "beta": 0.1, **options}
    # The reference is a separate model, which TRL loads from a folder.
    policy, judge = llama(0), llama(1, "LlamaForSequenceClassification", num_labels=1)
    policy.config._name_or_path = str(folder / "policy")
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    return trl.GRPOTrainer(
        policy,
        judge,
        args=trl.GRPOConfig(str(folder), **STEPS, **settings),
        train_dataset=rows("prompt"),
        processing_class=tokenizer,
        reward_processing_classes=tokenizer,
    )


def weights_after(trainer: Any) -> list[Tensor]:
    torch.manual_seed(1)  # for random completions
    trainer.train()
    return [parameter.detach() for parameter in trainer.model.parameters()]


MODELS = {"dpo": (dpo, ["ref_model"]), "grpo": (grpo, ["ref_model", "reward_funcs[0]"])}


@pytest.mark.parametrize("mode", ["swap", "stream"])
@pytest.mark.parametrize("kind", MODELS)
def test_weights_are_bitwise_those_of_the_plain_run(
    kind: str, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, names = MODELS[kind]
    want = weights_after(make(tmp_path))
    trainer = make(tmp_path)
    handle = callbacks.attach(trainer, offloader=None, memory=False, frozen=mode)
    caplog.set_level(logging.INFO, "hf_memopt")
    assert all(map(torch.equal, weights_after(trainer), want))
    (part,) = handle._parts
    assert list(part.visits) == names
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
    want = weights_after(grpo(tmp_path))
    trainer = grpo(tmp_path)
    handle = callbacks.attach(trainer, offloader=None, memory=False, frozen="stream", frozen_home="file")
    assert all(map(torch.equal, weights_after(trainer), want))
    (part,) = handle._parts
    read = {}
    for name, visits in part.visits.items():
        report = visits.teacher.report()
        assert report.home == "file"
        assert report.bytes_read >= report.file_bytes > 0
        read[name] = {Path(file.name).name for file in visits.teacher._files.files}
    assert "model.safetensors" in read["ref_model"]
    assert "model.safetensors" not in read["reward_funcs[0]"]  # was made in memory


def test_weights_that_are_frozen_in_the_policy_are_held_once(tmp_path: Path) -> None:
    trainer = dpo(tmp_path)
    layer = sum(parameter.nbytes for parameter in trainer.model.model.layers[0].parameters())
    (part,) = callbacks.attach(trainer, offloader=None, memory=False, frozen="swap")._parts
    report = part.visits["ref_model"].teacher.report()
    assert report.shared_bytes == layer
    assert report.host_bytes >= sum(each.nbytes for each in trainer.model.parameters()) - layer


def test_what_was_attached_can_be_removed(tmp_path: Path) -> None:
    trainer = dpo(tmp_path)
    num_callbacks = len(trainer.callback_handler.callbacks)
    handle = callbacks.attach(trainer, offloader=None, memory=False, frozen="swap")
    (part,) = handle._parts
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
    "nothing is frozen": (stand_in, "has no ref_model, teacher_model or reward model of its own .*; leave frozen out"),
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
    with pytest.raises(ValueError, match=f"^frozen: .*{reason}"):
        attach_module.FrozenModels(make(), "swap")


def test_a_reference_that_follows_the_policy_is_refused(tmp_path: Path) -> None:
    trainer = dpo(tmp_path, sync_ref_model=True)
    with pytest.raises(
        ValueError, match=r"SyncRefModelCallback changes the weights of ref_model.*sync_ref_model=False"
    ):
        callbacks.attach(trainer, frozen="swap")
    trainer.train()  # nothing was attached
