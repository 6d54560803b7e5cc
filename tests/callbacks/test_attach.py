from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from gradients import equal
from late_imports import LateModule
from offload_trainers import HOWS, decoder, everything, packed, run, switch_on, weights
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.activations.checkpointing.selective import apply_selective_checkpointing

callbacks = LateModule("hf_memopt.callbacks")
transformers = LateModule("transformers")


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
    callbacks.attach(trainer, offloader=offloader)
    trainer.train()
    assert entered == ["own", trainer.model]


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


@pytest.mark.parametrize("offloader", [None, "all"])
def test_selective_checkpointing_changes_no_bit_and_is_undone(make: Any, offloader: str | None) -> None:
    plain = make()
    plain.train()
    trainer = make()
    handle = callbacks.attach(trainer, offloader=offloader, selective_checkpointing=True)
    blocks = [module for module in trainer.model.modules() if "forward" in vars(module)]
    assert len(blocks) >= 2
    trainer.train()
    assert equal(weights(trainer), weights(plain))
    handle.remove()
    assert not any("forward" in vars(module) for module in blocks)


def test_it_is_refused_beside_gradient_checkpointing(make: Any) -> None:
    trainer = make()
    trainer.model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        callbacks.attach(trainer, selective_checkpointing=True)


def test_it_is_refused_where_model_init_makes_the_model_anew(make: Any) -> None:
    with pytest.raises(ValueError, match="selective_checkpointing=True: model_init makes the model"):
        callbacks.attach(make(model_init=decoder), selective_checkpointing=True)


def refuses(how: str, trainer: Any, offloader: ActivationOffloader, match: str) -> None:
    """Check that `attach` refuses at once, or the callback at the start of training."""
    callback = callbacks.ActivationOffloadCallback(offloader)
    begin = (trainer.args, trainer.state, trainer.control)
    refusal = pytest.raises(ValueError, match=match)
    if how == "attach":
        with refusal:
            callbacks.attach(trainer, offloader=offloader)
    else:
        with refusal:
            callback.on_train_begin(*begin, model=trainer.model)
    assert not trainer.model._forward_pre_hooks
    assert "compute_loss_context_manager" not in vars(trainer)


@pytest.mark.parametrize("how", HOWS)
def test_a_trainer_that_offloads_already_is_refused(make: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = {"use_reentrant": False, "offload": True}
    trainer = make(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    refuses(how, trainer, everything(), r"checkpointing_kwargs=\{'offload': True\}.*switch it off")

    trainer = make()
    trainer.args.activation_offloading = True  # as in TRL's arguments
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
    refuses(how, make(), everything(mode="inputs"), "mode='inputs'.*(gradient|activation)_checkpointing=True")
    selective = decoder()
    apply_selective_checkpointing(selective, policy="heavy_ops")
    switch_on(how, make(selective), everything(mode="inputs"))
    trainer = make()
    trainer.args._n_gpu = 2
    refuses(how, trainer, everything(), "n_gpu=2.*one process per GPU")


def test_offloading_twice_is_refused(make: Any) -> None:
    trainer = make()
    callbacks.attach(trainer, offloader=everything())
    with pytest.raises(ValueError, match="has an attached offloader already"):
        callbacks.attach(trainer, offloader=everything())
    trainer.add_callback(callbacks.ActivationOffloadCallback(everything()))
    with pytest.raises(ValueError, match="has an ActivationOffloadCallback"):
        trainer.train()

    with pytest.raises(ValueError, match="has an ActivationOffloadCallback"):
        callbacks.attach(make(callbacks=[callbacks.ActivationOffloadCallback(everything())]), offloader=everything())

    both = make(
        callbacks=[callbacks.ActivationOffloadCallback(everything()), callbacks.ActivationOffloadCallback(everything())]
    )
    with pytest.raises(ValueError, match="wraps the model already"):
        both.train()

    model = decoder()
    everything().wrap(model)
    with pytest.raises(ValueError, match="wraps the model already"):
        callbacks.attach(make(model), offloader=everything())


def test_bad_offloaders_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="offloader=3"):
        callbacks.attach(make(), offloader=3)
    with pytest.raises(ValueError, match="prefetch_ahead: give them to the ActivationOffloader"):
        callbacks.ActivationOffloadCallback(everything(), prefetch_ahead=3)


def test_remove_restores_the_trainer(make: Any) -> None:
    trainer = make()
    before = set(vars(trainer)), list(trainer.callback_handler.callbacks)
    offloader = everything()
    handle = callbacks.attach(trainer, offloader=offloader)
    handle.remove()
    handle.remove()
    assert (set(vars(trainer)), trainer.callback_handler.callbacks) == before
    trainer.train()
    assert packed(offloader) == 0
    again = callbacks.attach(trainer, offloader=offloader)
    handle.remove()
    trainer.train()
    assert packed(offloader) > 0
    again.remove()


def test_attaching_nothing_changes_nothing(make: Any) -> None:
    trainer = make()
    before = set(vars(trainer))
    callbacks.attach(trainer).remove()
    assert set(vars(trainer)) == before
