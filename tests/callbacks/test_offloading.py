"""Activation offloading in transformers' Trainer: the weights of the plain run, whatever happens in between."""

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from adversarial_copier import AdversarialCopier
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.activations import OffloadStats
from hf_memopt.activations.checkpointing.selective import apply_selective_checkpointing
from hf_memopt.callbacks import ActivationOffloadCallback, attach
from hf_memopt.callbacks.offloading import summary

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "attention_dropout": 0.1,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}

HOWS = ["attach", "callback"]


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


@functools.cache
def examples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (16,), generator=generator) for _ in range(32)]
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Trainer]:
    """A trainer of the tiny decoder: 6 steps of 2 micro-batches, an evaluation after every second."""

    def make(model: nn.Module | None = None, **options: Any) -> Trainer:
        of_trainer = {
            name: options.pop(name) for name in ("callbacks", "compute_loss_func", "model_init") if name in options
        }
        settings = {
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "no",
            "logging_steps": 2,
        }
        quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "output_dir": str(tmp_path / "out")}
        arguments = TrainingArguments(**{**settings, **quiet, **options})
        if "model_init" not in of_trainer:
            of_trainer["model"] = decoder() if model is None else model
        return Trainer(args=arguments, train_dataset=examples(), eval_dataset=examples()[:4], **of_trainer)

    return make


def everything(copier: Any = None, **options: Any) -> ActivationOffloader:
    return ActivationOffloader(
        **{"mode": "all", "offload_threshold_mb": 0, "copier": copier or SyncCopier(), **options}
    )


def switch_on(how: str, trainer: Trainer, offloader: ActivationOffloader) -> None:
    if how == "attach":
        attach(trainer, offloader=offloader)
    elif how == "callback":
        trainer.add_callback(ActivationOffloadCallback(offloader))


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def packed(offloader: ActivationOffloader) -> int:
    return offloader.stats.bytes_moved + offloader.stats.bytes_kept


class GenerateAtEvaluation(TrainerCallback):
    def __init__(self) -> None:
        self.generated: list[list[int]] = []

    def on_evaluate(self, *event: Any, model: Any, **kwargs: Any) -> None:
        prompt = examples()[0]["input_ids"][None, :4]
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
        self.generated.append(output[0].tolist())


def run(make: Any, how: str, offloader: ActivationOffloader, **options: Any) -> tuple[list[Tensor], list[list[int]]]:
    generating = GenerateAtEvaluation()
    trainer = make(callbacks=[generating], **options)
    switch_on(how, trainer, offloader)
    trainer.train()
    return weights(trainer), generating.generated


# ------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("offloads", ["sync", "late"])
def test_weights_are_bitwise_those_of_the_plain_run(make: Any, settings: str, offloads: str) -> None:
    """With accumulation, evaluation and generation in between, and dropout."""
    want, generated = run(make, "plain", everything(), **SETTINGS[settings])
    assert len(generated) == 3
    for how in HOWS:
        offloader = everything(AdversarialCopier("late") if offloads == "late" else SyncCopier())
        assert equal(run(make, how, offloader, **SETTINGS[settings])[0], want)
        assert offloader.stats.bytes_moved > 0
        assert offloader.stats.host_bytes_live == 0


@pytest.mark.parametrize("how", HOWS)
def test_generation_and_evaluation_are_the_plain_ones_and_pack_nothing(make: Any, how: str) -> None:
    _, want = run(make, "plain", everything())
    offloader = everything()
    assert run(make, how, offloader)[1] == want
    trainer = make()
    switch_on(how, trainer, offloader)
    before = packed(offloader)
    trainer.evaluate()
    assert packed(offloader) == before


def test_evaluation_enters_no_context(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = everything()
    trainer = make()
    attach(trainer, offloader=offloader)
    monkeypatch.setattr(offloader, "offload_context", lambda model: pytest.fail("entered"))
    trainer.evaluate()


def test_the_trainers_own_context_is_entered_and_its_model_given(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    offloader = everything()
    plain = offloader.offload_context
    trainer = make(max_steps=1, gradient_accumulation_steps=1, eval_strategy="no", model_init=decoder)

    @contextmanager
    def own_context() -> Iterator[None]:
        entered.append("own")
        yield

    def recording(model: nn.Module) -> Any:
        entered.append(model)
        return plain(model)

    monkeypatch.setattr(trainer, "autocast_smart_context_manager", own_context)
    monkeypatch.setattr(offloader, "offload_context", recording)
    attach(trainer, offloader=offloader)
    trainer.train()
    assert entered == ["own", trainer.model]


def test_inputs_of_checkpointed_layers(make: Any) -> None:
    settings = SETTINGS["checkpointing"]
    want, _ = run(make, "plain", everything(), **settings)
    offloader = everything(mode="inputs")
    assert equal(run(make, "attach", offloader, **settings)[0], want)
    micro_batches, layers, bytes_of_input = 12, 2, 2 * 16 * 32 * 4
    assert offloader.stats.bytes_moved >= micro_batches * layers * bytes_of_input


@pytest.mark.parametrize("settings", ["fp32", "checkpointing"])
def test_planned_offloading(make: Any, settings: str, caplog: pytest.LogCaptureFixture) -> None:
    """With evaluation between the passes that are recorded and those that follow the plan."""
    caplog.set_level(logging.INFO, logger="hf_memopt")
    want, _ = run(make, "plain", everything(), **SETTINGS[settings])
    for how in HOWS:
        offloader = everything(mode="auto", budget_gib=100_000 / 2**30)
        assert equal(run(make, how, offloader, **SETTINGS[settings])[0], want)
        assert offloader.stats.bytes_moved > 0
        assert offloader.stats.predicted_peak_gib is not None
        assert offloader.stats.predicted_peak_gib <= 100_000 / 2**30
        assert offloader.stats.host_bytes_live == 0
    assert sum("GiB predicted" in record.message for record in caplog.records) == 2


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits.float().softmax(-1).log()
    return nn.functional.nll_loss(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


def test_attach_sees_a_loss_outside_of_the_model_and_the_callback_does_not(make: Any) -> None:
    want, _ = run(make, "plain", everything(), compute_loss_func=own_loss)
    moved = {}
    for how in HOWS:
        offloader = everything()
        assert equal(run(make, how, offloader, compute_loss_func=own_loss)[0], want)
        moved[how] = offloader.stats.bytes_moved
    bytes_of_logits = 2 * 16 * 64 * 4
    assert moved["attach"] - moved["callback"] >= 12 * bytes_of_logits


def test_a_model_that_model_init_makes(make: Any) -> None:
    want, _ = run(make, "plain", everything(), model_init=decoder)
    for how in HOWS:
        offloader = everything()
        assert equal(run(make, how, offloader, model_init=decoder)[0], want)
        assert offloader.stats.bytes_moved > 0


# ------------------------------------------------------------------------------------------------ interruptions


class FailOnce:
    """Raises at one call of a layer: in its forward, or as backward reaches its output."""

    def __init__(self, error: Callable[[], Exception], place: str, call: int) -> None:
        self.error, self.place, self.call = error, place, call
        self.calls = 0

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.calls += torch.is_grad_enabled()
        if self.calls != self.call or not torch.is_grad_enabled():
            return
        if self.place == "forward":
            raise self.error()
        output.register_hook(self._raise)

    def _raise(self, gradient: Tensor) -> None:
        raise self.error()


def fail_once(trainer: Trainer, error: Callable[[], Exception], place: str, call: int) -> None:
    trainer.model.model.layers[1].register_forward_hook(FailOnce(error, place, call))


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_training_goes_on_exactly_after_an_exception(make: Any, place: str) -> None:
    ends = []
    for how in ("plain", *HOWS):
        offloader = everything()
        trainer = make()
        switch_on(how, trainer, offloader)
        fail_once(trainer, lambda: KeyError("injected"), place, call=4)
        with pytest.raises(KeyError, match="injected"):
            trainer.train()
        before = packed(offloader)
        assert before > 0 or how == "plain"
        x = torch.randn(4, requires_grad=True)
        (x * x).sum().backward()
        assert packed(offloader) == before, "a hook is left"
        trainer.train()
        assert offloader.stats.host_bytes_live == 0
        assert not trainer.model._forward_pre_hooks
        ends.append(weights(trainer))
    assert equal(ends[0], ends[1])
    assert equal(ends[0], ends[2])


def test_the_callback_leaves_the_model_when_told_to(make: Any) -> None:
    callback = ActivationOffloadCallback(everything())
    trainer = make(callbacks=[callback])
    fail_once(trainer, lambda: KeyError("injected"), "forward", call=1)
    with pytest.raises(KeyError):
        trainer.train()
    assert trainer.model._forward_pre_hooks
    callback.remove()
    callback.remove()
    assert not trainer.model._forward_pre_hooks


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Trainer collects garbage at every attempt; what is imported by now need not be looked at again and again."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
def test_auto_find_batch_size_starts_over(make: Any) -> None:
    """Trainer begins again with a smaller batch, without telling that the first training has ended."""
    ends = []
    for how in ("plain", *HOWS):
        offloader = everything()
        trainer = make(auto_find_batch_size=True, per_device_train_batch_size=4)
        switch_on(how, trainer, offloader)
        fail_once(trainer, lambda: RuntimeError("CUDA out of memory. Tried to allocate 1 GiB"), "backward", call=3)
        trainer.train()
        assert trainer._train_batch_size == 3
        assert offloader.stats.bytes_moved > 0 or how == "plain"
        assert offloader.stats.host_bytes_live == 0
        assert not trainer.model._forward_pre_hooks
        ends.append(weights(trainer))
    assert equal(ends[0], ends[1])
    assert equal(ends[0], ends[2])


@pytest.mark.parametrize("how", HOWS)
def test_a_resumed_run_is_the_uninterrupted_plain_one(make: Any, how: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = make(**saving, output_dir=str(tmp_path / "whole"))
    whole.train()
    first = make(**saving)
    switch_on(how, first, everything())
    first.train()
    resumed = make(**saving)
    offloader = everything()
    switch_on(how, resumed, offloader)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert offloader.stats.bytes_moved > 0
    assert equal(weights(resumed), weights(whole))


# ------------------------------------------------------------------------------------------------ refusals


def refuses(how: str, trainer: Trainer, offloader: ActivationOffloader, match: str) -> None:
    """`attach` refuses at once, the callback as training begins."""
    callback = ActivationOffloadCallback(offloader)
    begin = (trainer.args, trainer.state, trainer.control)
    refusal = pytest.raises(ValueError, match=match)
    if how == "attach":
        with refusal:
            attach(trainer, offloader=offloader)
    else:
        with refusal:
            callback.on_train_begin(*begin, model=trainer.model)
    assert not trainer.model._forward_pre_hooks
    assert "compute_loss_context_manager" not in vars(trainer)


@pytest.mark.parametrize("how", HOWS)
def test_a_trainer_that_offloads_already_is_refused(make: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = {"use_reentrant": False, "offload": True}
    trainer = make(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    refuses(how, trainer, everything(), r"gradient_checkpointing_kwargs=\{'offload': True\}.*switch it off")

    trainer = make()
    trainer.args.activation_offloading = True  # what TRL's arguments have
    refuses(how, trainer, everything(), "activation_offloading=True")

    fsdp = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=True, activation_checkpointing_offload=True
    )
    trainer = make()
    with monkeypatch.context() as patch:
        patch.setitem(AcceleratorState._shared_state, "fsdp_plugin", fsdp)
        refuses(how, trainer, everything(), "fsdp_activation_checkpointing_offload")

    deepspeed = SimpleNamespace(deepspeed_config={"activation_checkpointing": {"cpu_checkpointing": True}})
    trainer = make()
    with monkeypatch.context() as patch:
        patch.setattr(AcceleratorState, "deepspeed_plugin", deepspeed)
        refuses(how, trainer, everything(), "cpu_checkpointing")


@pytest.mark.parametrize("how", HOWS)
def test_what_offloading_would_not_reach_is_refused(make: Any, how: str) -> None:
    refuses(how, make(), everything(mode="inputs"), "mode='inputs'.*gradient_checkpointing=True")
    selective = decoder()
    apply_selective_checkpointing(selective, policy="heavy_ops")
    switch_on(how, make(selective), everything(mode="inputs"))
    trainer = make()
    trainer.args._n_gpu = 2
    refuses(how, trainer, everything(), "n_gpu=2.*one process per GPU")


def test_offloading_twice_is_refused(make: Any) -> None:
    trainer = make()
    attach(trainer, offloader=everything())
    with pytest.raises(ValueError, match="replaced already"):
        attach(trainer, offloader=everything())
    trainer.add_callback(ActivationOffloadCallback(everything()))
    with pytest.raises(ValueError, match="has an ActivationOffloadCallback"):
        trainer.train()

    with pytest.raises(ValueError, match="has an ActivationOffloadCallback"):
        attach(make(callbacks=[ActivationOffloadCallback(everything())]), offloader=everything())

    both = make(callbacks=[ActivationOffloadCallback(everything()), ActivationOffloadCallback(everything())])
    with pytest.raises(ValueError, match="wraps the model already"):
        both.train()

    model = decoder()
    everything().wrap(model)
    with pytest.raises(ValueError, match="wraps the model already"):
        attach(make(model), offloader=everything())


def test_bad_offloaders_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="offloader=3"):
        attach(make(), offloader=3)
    with pytest.raises(ValueError, match="prefetch_ahead: give them to the ActivationOffloader"):
        ActivationOffloadCallback(everything(), prefetch_ahead=3)


# ------------------------------------------------------------------------------------------------ use


def test_remove_restores_the_trainer(make: Any) -> None:
    trainer = make()
    before = set(vars(trainer)), list(trainer.callback_handler.callbacks)
    offloader = everything()
    handle = attach(trainer, offloader=offloader)
    handle.remove()
    handle.remove()
    assert (set(vars(trainer)), trainer.callback_handler.callbacks) == before
    trainer.train()
    assert packed(offloader) == 0
    again = attach(trainer, offloader=offloader)
    handle.remove()
    trainer.train()
    assert packed(offloader) > 0
    again.remove()


def test_attaching_nothing_changes_nothing(make: Any) -> None:
    trainer = make()
    before = set(vars(trainer))
    attach(trainer).remove()
    assert set(vars(trainer)) == before


def test_the_end_of_training_says_what_was_moved(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hf_memopt")
    for how in HOWS:
        run(make, how, everything())
    lines = [record.message for record in caplog.records if "moved to the host" in record.message]
    assert len(lines) == 2


def test_a_mode_by_name_and_a_cpu_on_which_nothing_moves(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(max_steps=1)
    attach(trainer, offloader="all")
    trainer.train()
    make(max_steps=1, callbacks=[ActivationOffloadCallback("all", prefetch_ahead=1)]).train()
    assert caplog.text.count("activation offloading moved nothing") == 2


def test_the_summary_names_what_was_predicted_and_what_was_measured() -> None:
    counters = {"bytes_kept": 0, "bytes_deduplicated": 0, "host_bytes_live": 0, "num_host_allocations": 0}
    counters |= {"bytes_recomputed": 0, "bytes_weights": 0}
    moved = {"bytes_moved": 3 * 2**30, "host_bytes_pinned": 2**30, "stall_ms": 12.3}
    plan = {"predicted_peak_gib": 2.0, "predicted_step_ms": 100.0}
    measured = {"measured_peak_gib": 1.5, "measured_step_ms": None}
    nothing = dict.fromkeys((*plan, *measured))
    plainly = "3.00 GiB moved to the host; 1.00 GiB of host memory used; compute waited 12 ms"
    assert summary(OffloadStats(**counters, **moved, **nothing)) == plainly
    assert summary(OffloadStats(**counters, **moved, **plan, **measured)) == (
        f"{plainly}; peak of saved activations 2.00 GiB predicted, 1.50 GiB measured; step 100.00 ms predicted"
    )
