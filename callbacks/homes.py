"""Homes off the device: a model's weights, frozen or all, which stream through the steps, and optimizers' state.

Contexts enclose a trainer's work: its forward passes with their losses, and calls of its models.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import str_to_bool
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_memopt.callbacks.memory_logging import MemoryLoggingCallback
from hf_memopt.transfer.scratch_file import check_disk
from hf_memopt.uncompiled import graph_break, uncompiled
from hf_memopt.weights import OffloadedOptimizer, StreamedWeights
from hf_memopt.weights.base import BaseHome, streamed_weights_of
from hf_memopt.weights.homes.home import HOMES, Home
from hf_memopt.weights.optimizer import OptimizerReport

logger = logging.getLogger(__name__)

LossContext = Callable[[], AbstractContextManager[Any]]

# The one method of a trainer that encloses forward and loss and not backward.
_SEAM = "compute_loss_context_manager"


def enclose(trainer: Trainer, context: LossContext) -> Callable[[], None]:
    """Enter a context around each forward pass and its loss, inside those added before; return how to undo that."""
    replaced = vars(trainer).get(_SEAM)
    if replaced is None:
        replaced = _Contexts(getattr(trainer, _SEAM))
        setattr(trainer, _SEAM, replaced)
    elif not isinstance(replaced, _Contexts):
        raise ValueError(f"{_SEAM} of this trainer is replaced already, by {replaced!r}; leave that out")
    contexts = replaced.contexts
    contexts.append(context)

    def undo() -> None:
        contexts.remove(context)
        if not contexts:
            delattr(trainer, _SEAM)

    return undo


def enclose_calls(model: nn.Module, context: Callable[[str], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Enter a context around each call of a model, and of the models of transformers inside; return how to undo that.

    Trainers call a model outside of losses too, to generate and to score, and sometimes the one inside of an adapter's.
    `context` gets the names of model and arguments, by which calls that take another way through the model differ.
    """
    undo = ExitStack()
    for module in model.modules():
        if module is model or isinstance(module, PreTrainedModel):
            undo.callback(enclose_calls_of(module, context))
    return undo.close


def enclose_calls_of(module: nn.Module, context: Callable[[str], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Do so for one module alone."""
    calls, undo = _Calls(context), ExitStack()
    undo.callback(module.register_forward_pre_hook(calls.enter, prepend=True, with_kwargs=True).remove)
    undo.callback(module.register_forward_hook(calls.leave, always_call=True).remove)
    return undo.close


class _Calls:
    def __init__(self, context: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._context = context
        self._entered: list[AbstractContextManager[Any]] = []

    @graph_break
    @uncompiled
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        entered = self._context(f"{type(module).__name__}({', '.join(sorted(kwargs))})")
        entered.__enter__()
        self._entered.append(entered)

    @graph_break
    @uncompiled
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:  # the hook runs too where an exception came before the call
            failure = sys.exc_info() if output is None else (None, None, None)
            self._entered.pop().__exit__(*failure)


class _Contexts:
    """Stands for the method: enters the trainer's own context and then the others."""

    def __init__(self, plain: LossContext) -> None:
        self.contexts: list[LossContext] = []
        self._plain = plain

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as stack:
            for context in (self._plain, *self.contexts):
                stack.enter_context(context())
            yield


class StreamedBase(TrainerCallback):
    """Runs a trainer's forward passes and losses, and other calls of its model, in `StreamedWeights.stream`.

    Args:
        base: the weights, or their home, from which they stream from now on and until `remove`. None takes those of a
            model that streams already, and `remove` leaves them so.
        trained: whether those stream that train, too, where `base` is a home.
    """

    def __init__(self, trainer: Trainer, base: BaseHome | StreamedWeights | None, trained: bool = False) -> None:
        if _is_attached(trainer):
            raise ValueError(f"base={base!r}: the trainer's base streams already; remove() the earlier handle first")
        present = streamed_weights_of(trainer.model)
        if present is not None and (base is None or base is present):
            self.weights = present
        elif base is None or isinstance(base, StreamedWeights):
            raise ValueError("base: these StreamedWeights are not of the trainer's model; make them of that")
        else:
            self.weights = stream_trainer(trainer, base, trained=trained)
        self._trainer, self._restores = trainer, base is not None
        self._undo = [enclose(trainer, self.weights.stream), enclose_calls(trainer.model, self.weights.stream)]
        trainer.add_callback(self)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            logger.info("%s", self.weights.report())

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._trainer.remove_callback(self)
        if self._restores:
            self.weights.remove()


def streams_alone(trainer: Trainer) -> bool:
    """Return whether a trainer's model streams and the trainer has no part for that yet."""
    return streamed_weights_of(trainer.model) is not None and not _is_attached(trainer)


def stream_trainer(trainer: Trainer, base: BaseHome, **settings: Any) -> StreamedWeights:
    """Return what `stream_base` does for the model of a trainer, which has moved it to its device."""
    if trainer.model_init is not None:
        raise ValueError(f"base={base!r}: model_init makes the model anew at each train(); give the trainer a model")
    _refuse_engines(base, trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled)
    is_moved = trainer.place_model_on_device and trainer.args.device.type != "cpu"
    if is_moved and streamed_weights_of(trainer.model) is None:
        logger.warning(
            "base=%r: the trainer has moved the whole model to %s before attach could run; for a base that does not "
            "fit there, make StreamedWeights before the trainer, or start the script with hf-memopt launch --base, "
            "which does",
            base,
            trainer.args.device,
        )
    return stream_base(trainer.model, trainer.args, base, **settings)


def stream_base(
    model: nn.Module | None,
    args: TrainingArguments | None,
    base: BaseHome,
    *,
    trained: bool = False,
    device: torch.device | None = None,
    **settings: Any,
) -> StreamedWeights:
    """Return the object by which a trainer's model streams; unless that streams already, it is made with `settings`."""
    if model is None:
        raise ValueError(f"base={base!r} needs a trainer that is given its model; leave model_init out")
    if args is not None:
        by_variable = str_to_bool(os.environ.get("ACCELERATE_USE_FSDP", "false"))
        _refuse_engines(base, args.deepspeed_plugin is not None, bool(args.fsdp or by_variable))
        if args.n_gpu > 1:
            raise ValueError(
                f"base={base!r}: nn.DataParallel copies the model to {args.n_gpu} devices; start one process per GPU "
                "with accelerate launch or torchrun"
            )
    present = streamed_weights_of(model)
    if present is None:
        if not trained and all(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"base={base!r}: model has no frozen weights that could stream; add trained=True for those that train, "
                "train adapters, or leave base out; for a frozen reference, teacher or reward model use frozen='auto'"
            )
        try:
            device = device if args is None else args.device
            return StreamedWeights(model, home=base, trained=trained, device=device, **settings)
        except ValueError as error:
            raise ValueError(f"base={base!r}: {error}") from error
    home = present.report().home
    if base not in ("auto", home):
        raise ValueError(f"base={base!r}: the model's weights stream already, with home={home!r}; use base={home!r}")
    if trained and not present.trained:
        raise ValueError("trained=True: the model's frozen weights stream already; make that StreamedWeights with it")
    return present


def _refuse_engines(base: BaseHome, deepspeed: bool, fsdp: bool) -> None:
    if deepspeed or fsdp:
        engine = "DeepSpeed" if deepspeed else "FSDP"
        raise ValueError(f"base={base!r}: {engine} places the weights of this trainer already; leave base out")


def _is_attached(trainer: Trainer) -> bool:
    return any(isinstance(callback, StreamedBase) for callback in trainer.callback_handler.callbacks)


class HomeOfOptimizers(TrainerCallback):
    """Gives the state of optimizers a home between updates, and logs the costs when a trainer's training ends.

    Args:
        weights: those that stream while they train, whose updates visit them. None leaves weights where they are.
        budget_gib: device memory for state that stays.
    """

    def __init__(
        self,
        home: Home,
        disk: str | os.PathLike[str] | None,
        weights: StreamedWeights | None = None,
        budget_gib: float | None = None,
    ) -> None:
        if home not in HOMES:
            raise ValueError(f"optimizer_home={home!r} is unknown; use one of {', '.join(HOMES)}")
        check_disk(disk)
        self._home: Home = home
        self._disk, self._weights, self._budget_gib = disk, weights, budget_gib
        self._reports: dict[object, OptimizerReport] = {}  # they outlive their optimizers
        self.unreached = (  # until one of them has made an update, then empty
            f"optimizer_home={home} reaches no optimizer that is stepped; give it to Accelerator.prepare, or make it "
            f"OffloadedOptimizer(optimizer, home={home!r}) in the script"
        )

    def take(self, optimizer: Any) -> Any:
        """Return an optimizer that keeps its state here."""
        if isinstance(optimizer, AcceleratedOptimizer) and isinstance(optimizer.optimizer, OffloadedOptimizer):
            return optimizer
        if not isinstance(optimizer, OffloadedOptimizer):
            try:
                optimizer = OffloadedOptimizer(optimizer, self._home, self._budget_gib, self._disk)
            except ValueError as error:
                option = f"optimizer_home={self._home!r}" if self._weights is None else "trained=True"
                raise ValueError(f"{option}: {error}") from error
        if self._weights is not None:
            self._weights.adopt(optimizer)
        key = object()

        def note(stepped: Any, *others: Any) -> None:
            self._reports[key], self.unreached = stepped.report(), ""

        optimizer.register_step_post_hook(note)
        return optimizer

    def take_from(self, trainer: Trainer) -> Callable[[], None]:
        """Take the optimizer that a trainer makes, or was given, when training begins; return how to undo that."""
        if any(isinstance(callback, HomeOfOptimizers) for callback in trainer.callback_handler.callbacks):
            raise ValueError(
                f"optimizer_home={self._home!r}: the trainer's optimizer has one already; remove() the earlier handle"
            )
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            self.refuse("DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP")
        plain = trainer.create_optimizer
        backward = trainer.accelerator.backward

        def create_optimizer(*args: Any, **kwargs: Any) -> Any:
            plain(*args, **kwargs)
            trainer.optimizer = self.take(trainer.optimizer)
            return trainer.optimizer

        def backward_with_update(*args: Any, **kwargs: Any) -> None:
            with self._update_in_backward(trainer):
                backward(*args, **kwargs)

        def undo() -> None:
            del trainer.create_optimizer
            if self._weights is not None:
                trainer.accelerator.backward = backward
            trainer.remove_callback(self)

        trainer.create_optimizer = create_optimizer
        if self._weights is not None:
            trainer.accelerator.backward = backward_with_update
        trainer.add_callback(self)
        return undo

    def _update_in_backward(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return the context of a backward pass: that of the update, where nothing looks at gradients in between."""
        accelerator, optimizer = trainer.accelerator, getattr(trainer.optimizer, "optimizer", None)
        may_be_seen = (
            trainer.args.max_grad_norm
            or accelerator.scaler is not None
            or type(trainer).training_step is not Trainer.training_step
            or any(
                type(each).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step
                for each in trainer.callback_handler.callbacks
                if not isinstance(each, MemoryLoggingCallback)
            )
        )
        if may_be_seen or not accelerator.sync_gradients or not isinstance(optimizer, OffloadedOptimizer):
            return nullcontext()
        return optimizer.update_in_backward()

    def refuse(self, engine: str) -> None:
        raise ValueError(
            f"optimizer_home={self._home!r}: {engine} places the optimizer's state already; leave optimizer_home out, "
            f"and use {engine}'s own offload"
        )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.log()

    def log(self) -> None:
        """Log the costs of the optimizers that have made updates since the last call."""
        for report in self._reports.values():
            if report.state_bytes or report.resident_bytes:
                logger.info("%s", report)
            else:
                logger.warning("optimizer_home=%r moves nothing: the optimizer keeps no state", self._home)
        self._reports.clear()
