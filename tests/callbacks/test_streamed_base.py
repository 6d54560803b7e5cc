"""Tests of `attach(trainer, base=...)`: training, evaluation and checkpoints of a model whose frozen base streams."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients import equal
from late_imports import LateModule
from offload_trainers import SETTINGS, decoder, everything
from torch import Tensor, nn

from hf_memopt import StreamedWeights
from hf_memopt.weights.base import streamed_weights_of

callbacks = LateModule("hf_memopt.callbacks")
datasets = LateModule("datasets")
peft = LateModule("peft")
streamed_base = LateModule("hf_memopt.callbacks.homes")
trainer_toys = LateModule("trainer_toys")
transformers = LateModule("transformers")
trl = LateModule("trl")
trl_trainers = LateModule("trl_trainers")

# Checkpoints every second step; the first one is the best, by a metric that falls.
CHECKPOINTS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}


def with_adapters() -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(decoder(), peft.LoraConfig(r=4, target_modules="all-linear"))


def with_frozen_layer() -> nn.Module:
    model: Any = decoder()
    model.model.layers[0].requires_grad_(False)
    return model


def state(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def losses(trainer: Any) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


def same_state(trainer: Any, other: Any) -> bool:
    ours, theirs = state(trainer), state(other)
    return ours.keys() == theirs.keys() and equal(list(ours.values()), list(theirs.values()))


@pytest.mark.e2e
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.sweep(share=0.25)
def test_weights_losses_and_answers_are_bitwise_the_plain_runs(make: Any, setting: str) -> None:
    generating = [trainer_toys.GenerateAtEvaluation() for _ in range(2)]
    plain = make(with_adapters(), callbacks=[generating[0]], **SETTINGS[setting])
    plain.train()
    trainer = make(with_adapters(), callbacks=[generating[1]], **SETTINGS[setting])
    offloader = everything()
    handle = callbacks.attach(trainer, offloader=offloader, base="file", memory=False)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert generating[0].generated == generating[1].generated != []
    assert same_state(trainer, plain)
    weights: Any = streamed_weights_of(trainer.model)
    report = weights.report()
    assert report.bytes_read > 2 * report.streamed_bytes
    assert report.resident.keys() == {"small"}
    assert offloader.stats.bytes_moved > 0
    handle.remove()
    assert same_state(trainer, plain)
    assert streamed_weights_of(trainer.model) is None
    assert not trainer.model._forward_pre_hooks
    assert "compute_loss_context_manager" not in vars(trainer)


def test_parts_can_be_removed_in_any_order(make: Any) -> None:
    trainer = make(with_adapters())
    offloading = callbacks.attach(trainer, offloader=everything(), memory=False)
    streaming = callbacks.attach(trainer, offloader=None, base="host", memory=False)
    offloading.remove()
    trainer.train()
    assert streamed_weights_of(trainer.model) is not None
    streaming.remove()
    assert "compute_loss_context_manager" not in vars(trainer)


def test_the_costs_are_logged(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_memopt")
    trainer = make(with_adapters(), max_steps=1)
    callbacks.attach(trainer, offloader=None, base="host", memory=False)
    trainer.train()
    assert "stream from host memory to cpu" in caplog.text


def test_a_model_that_streams_already_is_recognised(make: Any) -> None:
    plain = make(with_adapters())
    plain.train()
    model = with_adapters()
    weights = StreamedWeights(model, home="host")
    trainer = make(model)
    callbacks.attach(trainer, offloader=None, memory=False)
    callbacks.attach(trainer, offloader=everything(), memory=False)  # takes no second part for it
    trainer.train()
    assert same_state(trainer, plain)
    assert weights.report().smallest_budget_bytes


@pytest.mark.parametrize("base", ["auto", "host", None])
def test_what_streams_already_may_be_named(make: Any, base: str | None) -> None:
    model = with_adapters()
    weights = StreamedWeights(model, home="host")
    handle = callbacks.attach(make(model), offloader=None, base=base or weights, memory=False)
    assert streamed_weights_of(model) is weights
    handle.remove()
    assert streamed_weights_of(model) is None


def test_streamed_weights_that_are_not_named_go_on_streaming(make: Any) -> None:
    model = with_adapters()
    weights = StreamedWeights(model, home="host")
    callbacks.attach(make(model), memory=False).remove()
    assert streamed_weights_of(model) is weights


@pytest.mark.parametrize("make_model", [with_adapters, with_frozen_layer])
@pytest.mark.sweep(share=0.5)
def test_checkpoints_are_those_of_the_plain_run(make: Any, make_model: Callable[[], nn.Module], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain = make(make_model(), output_dir=str(tmp_path / "plain"), **CHECKPOINTS)
    plain.train()
    best = tmp_path / "streamed" / "checkpoint-2"
    trainer = make(make_model(), output_dir=str(tmp_path / "streamed"), **CHECKPOINTS)
    callbacks.attach(trainer, offloader=None, base="file", memory=False)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(best)
    assert same_state(trainer, plain)  # both have loaded the best one
    (file,) = best.glob("*.safetensors")
    saved, expected = load_file(file), load_file(tmp_path / "plain" / "checkpoint-2" / file.name)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)

    again = make(make_model(), output_dir=str(tmp_path / "streamed"))
    callbacks.attach(again, offloader=None, base="host", memory=False)
    again.train(resume_from_checkpoint=str(best))
    want = make(make_model(), output_dir=str(tmp_path / "plain"))
    want.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert same_state(again, want)


def other_home(make: Any) -> tuple[Any, Any]:
    model = with_adapters()
    StreamedWeights(model, home="host")
    return make(model), "file"


def of_another_model(make: Any) -> tuple[Any, Any]:
    return make(with_adapters()), StreamedWeights(with_adapters(), home="host")


def two_gpus(make: Any) -> tuple[Any, Any]:
    trainer = make(with_adapters())
    trainer.args._n_gpu = 2
    return trainer, "host"


def attached(make: Any) -> tuple[Any, Any]:
    trainer = make(with_adapters())
    callbacks.attach(trainer, base="host", offloader=None)
    return trainer, "host"


REFUSED: dict[str, tuple[Callable[[Any], tuple[Any, Any]], str]] = {
    "nothing frozen": (lambda make: (make(), "file"), "base='file': model has no frozen weights.* use frozen='auto'"),
    "unknown": (lambda make: (make(with_adapters()), "tape"), "base='tape': .*use one of auto, host, file"),
    "model_init": (lambda make: (make(model_init=with_adapters), "file"), "base='file': model_init makes the model"),
    "other home": (other_home, "base='file': the model's weights stream already, with home='host'"),
    "of another model": (of_another_model, "base: these StreamedWeights are not of the trainer's model"),
    "two GPUs": (two_gpus, "base='host': nn.DataParallel copies the model to 2 devices"),
    "attached": (attached, r"base='host': the trainer's base streams already; remove\(\) the earlier handle"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_trainers_whose_base_cannot_stream_are_refused(make: Any, kind: str) -> None:
    trainer, base = REFUSED[kind][0](make)
    before = list(trainer.callback_handler.callbacks)
    with pytest.raises(ValueError, match=f"^{REFUSED[kind][1]}"):
        callbacks.attach(trainer, base=base)
    assert trainer.callback_handler.callbacks == before


@pytest.mark.parametrize(("engine", "plugin"), [("DeepSpeed", "deepspeed_plugin"), ("FSDP", "fsdp_plugin")])
def test_engines_that_place_weights_are_refused(make: Any, engine: str, plugin: str, monkeypatch: Any) -> None:
    trainer = make(with_adapters())
    monkeypatch.setattr(trainer, f"is_{engine.lower()}_enabled", True)
    with pytest.raises(ValueError, match=f"^base='file': {engine} places the weights"):
        callbacks.attach(trainer, base="file")
    if engine == "FSDP":
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    else:
        monkeypatch.setattr(trainer.args, plugin, object())
    with pytest.raises(ValueError, match=f"^base='auto': {engine} places the weights"):
        streamed_base.stream_base(trainer.model, trainer.args, "auto")


def test_a_model_that_was_moved_to_an_accelerator_is_warned_of(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(with_adapters())
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda"))
    made = StreamedWeights(trainer.model, home="host")
    monkeypatch.setattr("hf_memopt.callbacks.homes.streamed_weights_of", lambda model: None)
    monkeypatch.setattr("hf_memopt.callbacks.homes.stream_base", lambda *args, **options: made)
    callbacks.attach(trainer, base="host", offloader=None, memory=False)
    (line,) = caplog.messages
    assert "has moved the whole model to cuda before attach could run" in line
    assert "make StreamedWeights before the trainer, or start the script with hf-memopt launch --base" in line


def adapters() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")


def sft(folder: Path) -> Any:
    rows = datasets.Dataset.from_list([{"text": "one two three " * 8}] * 16)
    return trained_by(trl.SFTTrainer, trl.SFTConfig(str(folder), **STEPS), rows)


def dpo(folder: Path) -> Any:
    rows = datasets.Dataset.from_list([{"prompt": "then one", "chosen": " two" * 7, "rejected": " three" * 7}] * 16)
    return trained_by(trl.DPOTrainer, trl.DPOConfig(str(folder), **STEPS), rows)


def grpo(folder: Path) -> Any:
    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [float(text.count("two")) for text in completions]

    rows = datasets.Dataset.from_list([{"prompt": "then one"}] * 8)
    settings = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1}
    arguments = trl.GRPOConfig(str(folder), **STEPS, **settings)
    return trained_by(trl.GRPOTrainer, arguments, rows, reward_funcs=reward)


STEPS: dict[str, Any] = {
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}


def decoder_with_tied_table() -> Any:
    """Return a model whose output layer is large, is its embedding too, and is read by TRL outside of its module."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.LlamaConfig(vocab_size=600, tie_word_embeddings=True, **special, **sizes)
    return transformers.LlamaForCausalLM(config)


def trained_by(trainer_class: Any, arguments: Any, rows: Any, **options: Any) -> Any:
    tokenizer = trl_trainers.tokenizer()
    tokenizer.padding_side = "left"
    return trainer_class(
        decoder_with_tied_table(),
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapters(),
        **options,
    )


@pytest.mark.e2e
@pytest.mark.parametrize("base", ["file", "host"])
@pytest.mark.parametrize("make_trainer", [sft, dpo, grpo])
@pytest.mark.sweep(share=0.4)
def test_adapters_of_trl_are_bitwise_those_of_the_plain_run(
    make_trainer: Callable[[Path], Any], base: str, tmp_path: Path
) -> None:
    plain, trainer = make_trainer(tmp_path), make_trainer(tmp_path)
    callbacks.attach(trainer, offloader=everything(), base=base, memory=False)
    for each in (plain, trainer):
        torch.manual_seed(1)  # for random completions
        each.train()
    assert losses(trainer) == losses(plain)
    assert same_state(trainer, plain)
    weights: Any = streamed_weights_of(trainer.model)
    report = weights.report()
    assert report.resident.keys() == {"small"}
    assert report.peak_device_bytes < report.streamed_bytes
    assert getattr(trainer, "ref_model", None) is None
