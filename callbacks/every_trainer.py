"""Runs a script and attaches to every Trainer and every Accelerator that it makes, as HF_MEMOPT says.

    HF_MEMOPT="budget_gib=6" torchrun --nproc_per_node 2 -m hf_memopt.callbacks.every_trainer train.py --lr 1e-4

`hf-memopt launch` starts this with `accelerate launch`. With `-m MODULE` in place of a file it is a module.
"""

import functools
import inspect
import logging
import os
import runpy
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from accelerate import Accelerator, DistributedType
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer

from hf_memopt.activations import ActivationOffloader
from hf_memopt.activations.checkpointing.selective import apply_selective_checkpointing
from hf_memopt.activations.wrapped_module import hook_direct_calls, wrapped_module
from hf_memopt.callbacks.arguments import VARIABLE, MemoptArguments
from hf_memopt.callbacks.fit import fitted
from hf_memopt.callbacks.frozen_models import FrozenModels
from hf_memopt.callbacks.homes import HomeOfOptimizers, enclose_calls_of
from hf_memopt.callbacks.offloading import OffloadedLoss, log_what_was_done
from hf_memopt.memory import explain_oom
from hf_memopt.process_trees import end_with_command
from hf_memopt.weights import StreamedWeights

logger = logging.getLogger(__name__)
_ENGINES = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)
_NOTHING_STREAMS = (
    "base reaches nothing: no model of the script has frozen weights; add trained=True for those that train"
)
NOTHING_ATTACHED = (
    "the script makes no Trainer and prepares no model with an Accelerator; in its loop enter "
    "ActivationOffloader.offload_context() around forward pass and loss"
)


def main(words: Sequence[str]) -> None:
    arguments = MemoptArguments.from_text(os.environ.get(VARIABLE, ""))
    if list(words[:2]) in ([], ["-m"]):
        raise ValueError("name a SCRIPT and its arguments, or -m MODULE and its arguments")
    end_with_command()
    show_messages(logging.WARNING if arguments.fit else logging.INFO)
    switches = fitted(**arguments.settings_of_fit()) if arguments.fit else attached(arguments)
    with switches, explain_oom() if arguments.memory_log else nullcontext():
        run_script(words)


def run_script(words: Sequence[str]) -> None:
    """Run a script, or `-m` and a module, with the arguments behind it, as Python itself would."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path[0] = str(Path(words[0]).absolute().parent)
        runpy.run_path(words[0], run_name="__main__")


@dataclass
class Attached:
    offloaders: weakref.WeakSet[ActivationOffloader] = field(default_factory=weakref.WeakSet)  # of all its models
    is_any: bool = False  # the script has made a Trainer, or prepared a model that is trained with an Accelerator
    unreached: list[str] = field(default_factory=list)  # a line for each option in use that does nothing here
    optimizers: HomeOfOptimizers | None = None  # the home of their state, if they have one


@contextmanager
def attached(arguments: MemoptArguments) -> Iterator[Attached]:
    """Attach to every Trainer and every Accelerator that is used inside.

    A Trainer gets the parts that `arguments.attach` adds: its base streams before it moves the model, and its frozen
    models are taken when training begins, since TRL's trainers get them after `Trainer.__init__`. The models that an
    Accelerator of its own prepares, and that have something to train, are wrapped in an offloader each, which sees
    their forward pass alone; their weights stream, and the state of its optimizers gets its home. All figures are
    logged.
    """
    trainers: weakref.WeakSet[Trainer] = weakref.WeakSet()
    of_accelerators: list[ActivationOffloader] = []
    streamed: dict[nn.Module, StreamedWeights] = {}
    found = Attached()
    if arguments.optimizer_home != "off" and not arguments.trained:
        found.optimizers = HomeOfOptimizers(
            arguments.optimizer_home, arguments.disk, budget_gib=arguments.optimizer_budget_gib
        )
    make_trainer, prepare = Trainer.__init__, Accelerator.prepare
    signature = inspect.signature(make_trainer)

    @functools.wraps(make_trainer)
    def make_and_attach(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        found.is_any = True
        given = signature.bind(trainer, *args, **kwargs).arguments
        arguments.stream_base(given.get("model"), given.get("args"))
        make_trainer(trainer, *args, **kwargs)
        trainers.add(trainer)
        home = arguments.optimizer_home if arguments.trained else "off"
        replace(arguments, frozen="off", frozen_home="host", optimizer_home=home).attach(trainer)
        if found.optimizers is not None:
            found.optimizers.take_from(trainer)
        if arguments.frozen != "off":
            FrozenModels(trainer, arguments.frozen, arguments.frozen_home, is_made=False)
        callbacks = trainer.callback_handler.callbacks
        found.offloaders.update(each.offloader for each in callbacks if isinstance(each, OffloadedLoss))

    @functools.wraps(prepare)
    def prepare_and_wrap(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        is_own = not any(trainer.accelerator is accelerator for trainer in trainers)
        if is_own:
            if arguments.base != "off":
                streamed.update(_stream(args, arguments, accelerator))
            args = tuple(_with_home(each, found, streamed, accelerator) for each in args)
        prepared = prepare(accelerator, *args, **kwargs)
        if is_own:
            for model in prepared if isinstance(prepared, tuple) else (prepared,):
                if isinstance(model, nn.Module) and any(each.requires_grad for each in model.parameters()):
                    if not found.unreached:
                        found.unreached = _of_trainers_alone(arguments)
                        if arguments.base != "off" and not streamed:
                            found.unreached.append(_NOTHING_STREAMS)
                        for line in found.unreached:
                            logger.warning("%s", line)
                    found.is_any = True
                    of_accelerators.extend(_wrap(model, arguments, accelerator))
            found.offloaders.update(of_accelerators)
        return prepared

    with patch.object(Trainer, "__init__", make_and_attach), patch.object(Accelerator, "prepare", prepare_and_wrap):
        try:
            yield found
        finally:  # many scripts end with sys.exit
            for offloader in of_accelerators:
                log_what_was_done(offloader)
            for weights in streamed.values():
                logger.info("%s", weights.report())
            if found.optimizers is not None:
                found.optimizers.log()
            if isinstance(sys.exception(), SystemExit | None):
                if not found.is_any:
                    logger.warning("nothing was attached: %s", NOTHING_ATTACHED)
                elif found.optimizers is not None and found.optimizers.unreached:
                    logger.warning("%s", found.optimizers.unreached)


def _of_trainers_alone(arguments: MemoptArguments) -> list[str]:
    """Return a line for each option in use that does nothing in a loop on Accelerate."""
    remedies = {
        "frozen": "make teacher = OffloadedTeacher(module, device=...), enter teacher.onload() around its calls",
        "leak_check": "a MemoryLogger shows memory that stays",
        "memory_report": "a MemoryLogger shows memory, and hf-memopt report its page",
    }
    given = {name: getattr(arguments, name) for name in remedies}
    return [
        f"{name}={value} reaches Trainers alone, not this loop on Accelerate; in the loop {remedies[name]}"
        for name, value in given.items()
        if value not in ("off", False)
    ]


def _stream(
    prepared: Sequence[Any], arguments: MemoptArguments, accelerator: Accelerator
) -> dict[nn.Module, StreamedWeights]:
    """Let weights of models stream that are to be prepared, and return the objects by which they do."""
    streamed = {}
    for model in prepared:
        trains = [each.requires_grad for each in model.parameters()] if isinstance(model, nn.Module) else []
        if any(trains) and (arguments.trained or not all(trains)):
            weights = arguments.stream_base(model, None, accelerator.device)
            assert weights is not None, "there is a base"
            enclose_calls_of(model, weights.stream)
            streamed[model] = weights
    return streamed


def _with_home(
    prepared: Any, found: Attached, streamed: dict[nn.Module, StreamedWeights], accelerator: Accelerator
) -> Any:
    """Return an optimizer whose state has its home, or another thing to prepare unchanged."""
    if not isinstance(prepared, Optimizer):
        return prepared
    trained = {each for group in prepared.param_groups for each in group["params"]}
    holders = (each for model, each in streamed.items() if each.trained and trained & set(model.parameters()))
    if holder := next(holders, None):
        holder.adopt(prepared)
    elif found.optimizers is not None:
        if accelerator.distributed_type in _ENGINES:
            found.optimizers.refuse(accelerator.distributed_type.value)
        return found.optimizers.take(prepared)
    return prepared


def _wrap(model: nn.Module, arguments: MemoptArguments, accelerator: Accelerator) -> Iterator[ActivationOffloader]:
    if wrapped_module(model) is not None:
        return
    if arguments.selective_checkpointing:
        apply_selective_checkpointing(model)
    offloader = arguments.make_offloader(accelerator.device)
    if offloader is not None:
        offloader.wrap(model)
        hook_direct_calls(model)
        yield offloader


def show_messages(level: int = logging.INFO) -> None:
    """Show this library's messages, those of `fit` from INFO on, and leave the script's own logging alone."""
    ours = logging.getLogger("hf_memopt")
    ours.setLevel(level if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    logging.getLogger("hf_memopt.callbacks.fit").setLevel(logging.INFO)
    ours.addHandler(logging.StreamHandler())
    ours.propagate = False


if __name__ == "__main__":
    main(sys.argv[1:])
