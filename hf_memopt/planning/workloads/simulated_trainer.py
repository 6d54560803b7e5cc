"""A trainer on the simulated accelerator. It is changed for good, so it has to be in a process of its own."""

import copy
import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import send_to_device
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Trainer, TrainerCallback

from hf_memopt.activations import ActivationOffloader
from hf_memopt.callbacks.attach import attach
from hf_memopt.callbacks.frozen_models import FrozenModels
from hf_memopt.callbacks.homes import StreamedBase
from hf_memopt.planning.accounting.allocation_log import GENERATION
from hf_memopt.planning.models.accelerate_config import DDP, Sharing, sharded_options, zero_plugin
from hf_memopt.planning.simulation.device import phase_named, replace_memory
from hf_memopt.planning.simulation.patched_accelerate import adapters_kept_by_fsdp, prepare_in, take_off
from hf_memopt.planning.simulation.patched_transformers import place_arguments, prepare_once
from hf_memopt.planning.simulation.patched_trl import SimulatedGeneration, generates
from hf_memopt.planning.simulation.quantised.quantised_base import QuantisedLinear
from hf_memopt.planning.workload import OFF
from hf_memopt.planning.workloads.file_trainer import OwnLoss
from hf_memopt.planning.workloads.trainer_batches import TrainerWindow, num_bytes
from hf_memopt.weights import StreamedWeights

MODEL = "model"


@dataclass(frozen=True)
class TrainerSwitches:
    """Options of `attach` for a simulated trainer. The home "off" changes nothing."""

    offload: str = "off"
    offload_threshold_mb: float = 10.0
    selective_checkpointing: bool = False
    base: str = OFF
    base_budget_gib: float | None = None
    trained: bool = False
    optimizer_home: str = "off"

    @property
    def streams(self) -> bool:
        return self.base != OFF

    def attach_to(self, trainer: Trainer, device: torch.device) -> None:
        if self == TrainerSwitches():
            return
        base: Any = None
        if self.streams:
            home: Any = self.base
            budget_gib, model = self.base_budget_gib, trainer.model
            base = StreamedWeights(model, home=home, trained=self.trained, budget_gib=budget_gib, device=device)
        offloader = None
        if self.offload != "off":
            offloader = ActivationOffloader(mode=self.offload, offload_threshold_mb=self.offload_threshold_mb)
        optimizer_home: Any = None if self.optimizer_home == "off" else self.optimizer_home
        attach(
            trainer,
            offloader=offloader,
            base=base,
            trained=self.trained,
            optimizer_home=optimizer_home,
            selective_checkpointing=self.selective_checkpointing,
            memory=False,
        )


class SimulatedTrainer:
    """Puts a trainer on a device that is simulated, without values, and runs its own `train`, one update at a time.

    Its callbacks do not run, apart from those that offload: they log, evaluate and save. Of the `batches` that it
    accumulates at most two run, the largest last, since the third finds memory as the second did; all are there. The
    first update has the largest alone: it creates the optimizer's state. Engines and generation keep all of them.
    `modules` are the trained model as `MODEL`, and others that the trainer has, such as a reference model.
    """

    def __init__(
        self,
        trainer: Trainer,
        window: TrainerWindow,
        device: torch.device,
        sharing: Sharing | None = None,
        switches: TrainerSwitches | None = None,
    ) -> None:
        gc.freeze()  # Trainer collects garbage, among a million objects that stay
        self._trainer, shared, switched = trainer, sharing or Sharing(), switches or TrainerSwitches()
        _engine(trainer, shared)
        args = trainer.args
        args.distributed_state = PartialState()
        place_arguments(args, device)
        # Else Trainer would move the model in each update, away from an engine.
        args.bf16_full_eval = args.fp16_full_eval = False
        args.eval_on_start = args.auto_find_batch_size = args.push_to_hub = False
        args.logging_nan_inf_filter = False  # would read every loss
        self._generation = (
            SimulatedGeneration(trainer, partial(phase_named, GENERATION)) if generates(trainer) else None
        )
        handler = trainer.callback_handler
        on_the_host = [each for each in handler.callbacks if isinstance(each, FrozenModels)]
        for frozen in on_the_host:
            frozen.remove()
        modules = dict(modules_of(trainer))
        prepared = {name for name, module in modules.items() if take_off(module)}
        _renew_accelerator(trainer)
        for name, module in modules.items():
            # Engines take weights from the host, and weights that stream have their home there.
            is_on_host = name == MODEL and (shared.engine != DDP or switched.streams)
            _place(module, torch.device("cpu") if is_on_host else device)
            if name in prepared and name != MODEL:
                trainer.accelerator.prepare_model(module, evaluation_mode=True)
        for frozen in on_the_host:
            FrozenModels(trainer, frozen.mode)
        _renew_optimizer(trainer)
        switched.attach_to(trainer, device)
        if isinstance(trainer, OwnLoss):
            trainer.enter(device)
        self.batches = send_to_device(window.batches, device) if window.moves else window.batches
        *others, largest = sorted(self.batches, key=num_bytes)
        # The first pass generates for all.
        running = _Batches([*(largest if self._generation else each for each in others[:1]), largest])
        args.gradient_accumulation_steps, args.max_steps = len(running), 1
        first = running if shared.has_group or self._generation else _Batches(running[-1:])
        of_updates = chain([first], repeat(running))
        trainer.get_train_dataloader = lambda: next(of_updates)
        handler.callbacks = [each for each in handler.callbacks if offloader_of(each) or isinstance(each, StreamedBase)]
        if shared.has_group:
            is_quantised = any(isinstance(module, QuantisedLinear) for module in trainer.model.modules())
            with adapters_kept_by_fsdp() if is_quantised else nullcontext():
                prepare_once(trainer, running)

    @property
    def modules(self) -> dict[str, nn.Module]:
        return dict(modules_of(self._trainer))

    def step(self) -> None:
        """Make one update; the optimizer goes on where it was."""
        if self._generation is not None:
            self._generation.begin_update()
        self._trainer.train()


def offloader_of(callback: TrainerCallback) -> ActivationOffloader | None:
    offloader = getattr(callback, "offloader", None)
    return offloader if isinstance(offloader, ActivationOffloader) else None


class _Batches(list[Any]):
    """Gives mappings of its own for each update, as a dataloader does: some trainers take entries out of them."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield copy.copy(batch) if isinstance(batch, Mapping) else batch


def modules_of(trainer: Trainer) -> Iterator[tuple[str, nn.Module]]:
    yield MODEL, trainer.model
    known = set(trainer.model.modules())
    for name, value in vars(trainer).items():
        values = value if isinstance(value, list | tuple) else [value]
        for number, module in enumerate(values):
            if isinstance(module, nn.Module) and module not in known:
                known |= set(module.modules())
                yield name if module is value else f"{name}.{number}", module


def _engine(trainer: Trainer, sharing: Sharing) -> None:
    """Give the trainer the engine that `accelerate launch` would give it."""
    args = trainer.args
    args.ddp_find_unused_parameters = False  # buckets have the same bytes
    if sharing.is_zero:
        zero = zero_plugin(sharing, args.gradient_accumulation_steps, args.max_grad_norm)
        zero.deepspeed_config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
        args.deepspeed_plugin = zero
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # before accelerate looks for its backend, as when launched
    elif sharing.engine != DDP:
        args.fsdp_plugin_args = sharded_options(sharing)


def _renew_accelerator(trainer: Trainer) -> None:
    """Give the trainer an `Accelerator` whose fp16 has no scaler, which would read values."""
    precision = trainer.args.mixed_precision
    trainer.args.mixed_precision = "bf16" if precision == "fp16" else precision
    (trainer.args.accelerator_config.gradient_accumulation_kwargs or {}).pop("num_steps", None)  # of the one before
    trainer.create_accelerator_and_postprocess()
    prepare_in(precision, trainer.accelerator)


def _place(module: nn.Module, device: torch.device) -> None:
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            if not isinstance(parameter, FakeTensor):  # a tied one has been there before
                replace_memory(parameter, _empty_like(parameter, device))
                parameter.grad = None
        for name, buffer in child.named_buffers(recurse=False):
            child._buffers[name] = _empty_like(buffer, device)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _renew_optimizer(trainer: Trainer) -> None:
    """Reset an optimizer that was given, or that trained before."""
    if trainer.optimizer is not None:
        trainer.optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        trainer.optimizer.state.clear()
