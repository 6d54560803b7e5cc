"""Activation offloading as a Trainer callback, and the conditions for a Trainer to offload at all."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_memopt.activations import ActivationOffloader, WrappedModule
from hf_memopt.activations.checkpointing.selective import CheckpointedForward
from hf_memopt.activations.wrapped_module import wrapped_module
from hf_memopt.autograd_state import in_backward
from hf_memopt.callbacks.homes import enclose, enclose_calls_of
from hf_memopt.report.offloading import in_words
from hf_memopt.uncompiled import graph_break, uncompiled

logger = logging.getLogger(__name__)


class ActivationOffloadCallback(TrainerCallback):
    """Offloads tensors that the model's forward saves for backward, by plain registration: `callbacks=[...]`.

    When an exception ends training, hooks stay on the model until the next `train()` or `remove()`.

    It sees the model's forward alone. Tensors that a loss outside of it saves (`compute_loss_func`, label smoothing, a
    `compute_loss` of one's own), often the logits and so the largest of all, stay on the device; and torch.compile
    splits its graph at the hooks. `hf_memopt.attach` has neither limit.

    Args:
        offloader: an `ActivationOffloader` or one of its modes. None, one made of `options`.
        options: options of `ActivationOffloader`, unless one is given.

    Raises:
        ValueError: when training begins, if activations are offloaded already, naming the option to switch off.

    Example:
        >>> Trainer(..., callbacks=[ActivationOffloadCallback(mode="auto", budget_gib=4.0)])
    """

    def __init__(self, offloader: ActivationOffloader | str | None = None, **options: Any) -> None:
        self.offloader = make_offloader(offloader, **options)
        self._wrapped: WrappedModule | None = None

    def on_train_begin(self, args: TrainingArguments, *others: Any, model: nn.Module, **kwargs: Any) -> None:
        # May come twice without an end in between: auto_find_batch_size starts over, and an exception ends nothing.
        self.remove()
        refuse_what_conflicts(self.offloader, args, model)
        self._wrapped = self.offloader.wrap(model)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        self.remove()
        if state.is_world_process_zero:
            log_what_was_done(self.offloader)

    def remove(self) -> None:
        """Take the hooks off the model."""
        if self._wrapped is not None:
            self._wrapped.remove()
            self._wrapped = None


class OffloadedLoss(TrainerCallback):
    """Runs a trainer's forward pass and loss, where gradients are recorded, in an `offload_context`.

    Losses of sentence-transformers that cache gradients run the model again in backward: those calls get a context too.

    Hooks entered in `on_step_begin` would outlive an exception and pack tensors that checkpointed layers recompute.
    """

    def __init__(self, trainer: Trainer, offloader: ActivationOffloader) -> None:
        if any(isinstance(callback, OffloadedLoss) for callback in trainer.callback_handler.callbacks):
            raise ValueError("the trainer has an attached offloader already; remove() the earlier handle first")
        _refuse_callback(trainer)
        refuse_what_conflicts(offloader, trainer.args, trainer.model)
        self.offloader = offloader
        self._trainer = trainer
        self._undo = enclose(trainer, self._context)
        self._undo_calls: Callable[[], None] = lambda: None
        trainer.add_callback(self)

    def on_train_begin(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        # Either may have changed after attaching.
        _refuse_callback(self._trainer)
        refuse_what_conflicts(self.offloader, args, self._trainer.model)
        self._undo_calls()
        if _caches_gradients(self._trainer):  # hooks on other models would only split compiled graphs
            self._undo_calls = enclose_calls_of(self._trainer.model, self._context_in_backward)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            log_what_was_done(self.offloader)

    def remove(self) -> None:
        self._undo()
        self._undo_calls()
        self._trainer.remove_callback(self)

    def _context_in_backward(self, call: str) -> AbstractContextManager[Any]:
        return self._context() if in_backward() else nullcontext()

    def _context(self) -> AbstractContextManager[Any]:
        if not torch.is_grad_enabled():  # evaluation
            return nullcontext()
        # FSDP and model_init replace the model after attaching.
        return self.offloader.offload_context(self._trainer.model)


class OffloadedLoop:
    """Offloads what a loop saves from a model's call on until backward begins: losses and other models included.

    The call of a part, as of an autoencoder's encoder, counts as one of the model. Where hooks on saved tensors are
    active already, or stay active until backward, such as another offloader's, nothing is done.
    """

    def __init__(self, model: nn.Module, offloader: ActivationOffloader) -> None:
        self._model, self._offloader = model, offloader
        self._context: AbstractContextManager[Any] | None = None
        self._hooks: Any = None  # of the context
        for module in (model, *model.children()):
            module.register_forward_pre_hook(self._open, prepend=True)

    @graph_break
    @uncompiled
    def _open(self, *args: Any) -> None:
        if self._context is None and torch.is_grad_enabled() and not in_backward() and _top_hooks() is None:
            context = self._offloader.offload_context(self._model)
            context.__enter__()
            self._context, self._hooks = context, _top_hooks()

    def close(self) -> None:
        """End the pass, since backward begins."""
        if self._context is not None and _top_hooks() == self._hooks:
            context, self._context, self._hooks = self._context, None, None
            context.__exit__(None, None, None)


def _top_hooks() -> Any:
    """Return the innermost hooks on saved tensors, or None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def make_offloader(offloader: ActivationOffloader | str | None, **options: Any) -> ActivationOffloader:
    if offloader is None:
        return ActivationOffloader(**options)
    if isinstance(offloader, str):
        return ActivationOffloader(mode=offloader, **options)
    if not isinstance(offloader, ActivationOffloader):
        raise ValueError(f"offloader={offloader!r} is neither an ActivationOffloader nor the name of a mode")
    if options:
        raise ValueError(f"{', '.join(options)}: give them to the ActivationOffloader, since one is given as offloader")
    return offloader


def refuse_what_conflicts(offloader: ActivationOffloader, args: TrainingArguments, model: nn.Module) -> None:
    """Refuse other offloading: only the innermost saved-tensor hooks run, so one of two would do nothing, unnoticed."""
    for option, is_on in _other_offloading(args).items():
        if is_on:
            raise ValueError(f"{option} offloads activations already, and two offloaders do not stack; switch it off")
    if wrapped_module(model) is not None:
        raise ValueError("an ActivationOffloader wraps the model already, and two do not stack; remove() its handle")
    if args.n_gpu > 1:
        raise ValueError(
            f"n_gpu={args.n_gpu}: under nn.DataParallel, forwards run in threads that activation offloading does not "
            "reach; start one process per GPU with accelerate launch or torchrun, or set CUDA_VISIBLE_DEVICES to one"
        )
    if offloader.mode == "inputs" and not _checkpoints(args, model):
        raise ValueError(
            "mode='inputs' offloads the inputs of checkpointed layers, and there are none; set "
            f"{_checkpointing_field(args)}=True, or use mode='auto' or 'all'"
        )


def log_what_was_done(offloader: ActivationOffloader) -> None:
    """Log one line; a warning where offloading did nothing, unless nothing was trained."""
    stats = offloader.stats_at_peak
    if stats.bytes_kept == stats.bytes_weights == stats.bytes_moved == 0:
        logger.info("activation offloading: no pass has saved anything for backward")
    elif stats.bytes_moved == 0 and stats.predicted_peak_gib is None:
        reason = offloader.report().note.removeprefix("nothing is moved: ")
        logger.warning("activation offloading moved nothing: %s", reason)
    else:
        logger.info("activation offloading: %s", "; ".join(in_words(stats)))


def _other_offloading(args: TrainingArguments) -> dict[str, bool]:
    """Return which options that install saved-tensor hooks, or move checkpoints to the host, are on."""
    state = AcceleratorState()
    fsdp = getattr(state, "fsdp_plugin", None)
    deepspeed = getattr(state, "deepspeed_plugin", None)
    config = {} if deepspeed is None else deepspeed.deepspeed_config
    field = _checkpointing_field(args)
    return {
        # TRL's trainers
        "activation_offloading=True": getattr(args, "activation_offloading", False),
        # transformers from 5.17 on
        f"{field}_kwargs={{'offload': True}}": bool(
            getattr(args, field) and (getattr(args, f"{field}_kwargs") or {}).get("offload")
        ),
        # accelerate's FSDP plugin
        "fsdp_activation_checkpointing_offload": getattr(fsdp, "activation_checkpointing_offload", False),
        "cpu_checkpointing in DeepSpeed's activation_checkpointing": bool(
            config.get("activation_checkpointing", {}).get("cpu_checkpointing")
        ),
    }


def _checkpoints(args: TrainingArguments, model: nn.Module) -> bool:
    """Return whether layers run checkpointed; a model that does not tell counts as one that does."""
    fsdp = getattr(AcceleratorState(), "fsdp_plugin", None)
    if getattr(args, _checkpointing_field(args)) or getattr(fsdp, "activation_checkpointing", False):
        return True
    selectively = any(isinstance(vars(module).get("forward"), CheckpointedForward) for module in model.modules())
    told = getattr(model, "is_activation_checkpointing", None)  # in older transformers by the other name
    return selectively or (getattr(model, "is_gradient_checkpointing", True) if told is None else told)


def _checkpointing_field(args: TrainingArguments) -> str:
    """Return the newer of two names, which is the one that Trainer reads."""
    names = "activation_checkpointing", "gradient_checkpointing"
    return next(name for name in names if hasattr(args, name))


def _caches_gradients(trainer: Any) -> bool:
    loss = getattr(trainer, "loss", None)
    losses = loss.values() if isinstance(loss, dict) else [loss]
    modules = (module for each in losses if isinstance(each, nn.Module) for module in each.modules())
    return any(getattr(module, "uses_gradient_cache", False) for module in modules)


def _refuse_callback(trainer: Trainer) -> None:
    if any(isinstance(callback, ActivationOffloadCallback) for callback in trainer.callback_handler.callbacks):
        raise ValueError(
            "the trainer has an ActivationOffloadCallback, and two offloaders do not stack; remove it, since attach "
            "sees more"
        )
