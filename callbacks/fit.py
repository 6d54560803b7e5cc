"""Decides, while a training runs, where its parts live, so that it fits in the memory that there is.

The decision comes in stages. Before a model is prepared, sizes show whether its weights have room. The first
micro-batch runs with its saved activations away, and shows what everything else takes. Then parts leave in the order of
their cost, as far as needed, and again whenever memory turns out to be short. They leave by the means of `attach`, so
that no bit changes.
"""

import functools
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch._logging._internal import warning_once
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach
from transformers import Trainer

from hf_memopt.activations import ActivationOffloader
from hf_memopt.activations.plan_maker import USABLE
from hf_memopt.autograd_state import in_backward
from hf_memopt.callbacks.frozen_models import FrozenModels, frozen_modules
from hf_memopt.callbacks.homes import StreamedBase, enclose_calls_of
from hf_memopt.callbacks.offloading import OffloadedLoop, OffloadedLoss
from hf_memopt.memory.memory_limit import LimitedMemory, lift_memory_limit, limit_memory
from hf_memopt.text_table import Cell, Table
from hf_memopt.transfer.host_memory import available_bytes, map_large_blocks, return_freed_memory
from hf_memopt.transfer.scratch_file import default_disk
from hf_memopt.units import GIB, KIB, MIB, format_bytes
from hf_memopt.weights import OffloadedOptimizer, StreamedWeights
from hf_memopt.weights.homes.home import Home
from hf_memopt.weights.homes.weight_files import MappedMemory

logger = logging.getLogger(__name__)

# Names a file in which the training's process notes how far it has come, for the command that has started it. If it
# exists when the process starts, all parts are away from the first step on.
STATUS_VARIABLE = "HF_MEMOPT_FIT_STATUS"
# Storages of saved activations that may move, in MiB; smaller ones where everything has to be away.
_THRESHOLD_MB, _SMALL_THRESHOLD_MB = 1.0, 0.0625
_ANY_SLOWDOWN = 1e9
# Passes until plans of saved activations hold: two that are recorded, one that follows the plan.
_PASSES_TO_LEARN = 3
# Minimum memory of a step in addition to weights and gradients.
_LEAST_ROOM_BYTES = 64 * MIB
# Excess that changes nothing any more once the first steps are over.
_TOLERATED_BYTES = 20 * MIB
_ENGINES = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


class DoesNotFitError(RuntimeError):
    """Training needs more memory than the limit allows, or waits more than it may."""


@dataclass
class _Model:
    """A model that trains, and how its parts live elsewhere."""

    module: nn.Module
    accelerator: Accelerator
    trainer: Trainer | None
    offloader: ActivationOffloader
    weights: StreamedWeights | None = None
    loop: OffloadedLoop | None = None
    undo: ExitStack = field(default_factory=ExitStack)


@dataclass
class _State:
    """An optimizer, and where its state lives."""

    plain: Optimizer
    home: OffloadedOptimizer | None = None
    sizes: dict[torch.Tensor, int] = field(default_factory=dict)
    has_stepped: bool = False
    is_movable: bool = True

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [each for group in self.plain.param_groups for each in group["params"]]

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of state that are on the device, or will be after the first update."""
        return sum(self.sizes.values()) if self.home is None else 0

    @property
    def coming_bytes(self) -> int:
        return 0 if self.has_stepped else self.resident_bytes

    @property
    def update_bytes(self) -> int:
        """Return the temporary memory of an update: a copy of all weights, where it takes them at once."""
        if self.home is None and any(map(_takes_all, self.plain.param_groups)):
            return sum(each.nbytes for each in self.sizes)
        return 2 * max((each.nbytes for each in self.sizes), default=0)


class Fit:
    """The decisions for the trainings of one process; what `attach(trainer, fit=True)` and `hf-memopt fit` do.

    Args:
        memory_gib: device memory that the process may take, on a CPU its own memory. None: what it has and what is
            free.
        host_budget_gib: host memory for saved activations that leave the device. None: nine tenths of what is free.
        disk: folder on a local disk. None: none, on a CPU the system's for temporary files.
        disk_budget_gib: room for saved activations on that disk. None: no limit but the disk's.
        max_waiting: training ends where it waits for copies and files for more than this share of the time in which it
            computes. None: no limit.
        is_tight: whether all parts are away from the start.

    Raises:
        ValueError: several processes train together.
    """

    def __init__(
        self,
        memory_gib: float | None = None,
        host_budget_gib: float | None = None,
        disk: str | None = None,
        disk_budget_gib: float | None = None,
        max_waiting: float | None = None,
        is_tight: bool = False,
    ) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "fit=True decides for one process, and WORLD_SIZE is greater than 1; use hf-memopt plan for several "
                "GPUs, with FSDP or DeepSpeed"
            )
        self._memory_gib, self._host_budget_gib, self._max_waiting = memory_gib, host_budget_gib, max_waiting
        self._disk, self._disk_budget_gib, self.is_tight = disk, disk_budget_gib, is_tight
        self._device = torch.device("cpu")
        self._limited: LimitedMemory | None = None
        self._trainers: weakref.WeakKeyDictionary[Accelerator, Trainer] = weakref.WeakKeyDictionary()
        self._models: list[_Model] = []
        self._states: list[_State] = []
        self._frozen: dict[Trainer, FrozenModels] = {}
        self._num_passes = 0
        self._offloads = is_tight  # whether saved activations have to leave
        self._is_settled = self.is_making_trainer = False
        self._begun_s = 0.0
        self._undo = ExitStack()

    def take(self, trainer: Trainer) -> None:
        """Decide for what a trainer trains, whose accelerator is watched."""
        self._trainers[trainer.accelerator] = trainer
        train = trainer.train

        @functools.wraps(train)
        def train_and_give_back(*args: Any, **kwargs: Any) -> Any:
            result = train(*args, **kwargs)
            self._give_back()
            return result

        trainer.train = train_and_give_back
        self._undo.callback(delattr, trainer, "train")

    def watch(self, accelerator: Accelerator) -> None:
        """Decide for what an accelerator prepares from now on."""
        if accelerator.distributed_type in _ENGINES:
            engine = accelerator.distributed_type.value
            raise ValueError(f"fit=True: {engine} places weights and optimizer states already; leave fit out")
        self._begin(accelerator.device)
        kind: Any = type(accelerator)  # whose methods may be others while a trainer is made

        @functools.wraps(kind.prepare_model)
        def place_and_prepare_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._take_model(model, accelerator)
            return kind.prepare_model(accelerator, model, *args, **kwargs)

        @functools.wraps(kind.prepare_optimizer)
        def take_and_prepare_optimizer(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._take_optimizer(optimizer)
            return kind.prepare_optimizer(accelerator, optimizer, *args, **kwargs)

        accelerator.prepare_model = place_and_prepare_model
        accelerator.prepare_optimizer = take_and_prepare_optimizer
        self._undo.callback(delattr, accelerator, "prepare_model")
        self._undo.callback(delattr, accelerator, "prepare_optimizer")

    def attach(self, trainer: Trainer) -> None:
        """Decide for a trainer that has been made."""
        self.watch(trainer.accelerator)
        self.take(trainer)

    def remove(self) -> None:
        """Restore what was attached. Takes device memory for all weights."""
        for model in self._models:
            model.undo.close()
        self.close()

    def close(self) -> None:
        """Decide no more, and lift the limit; parts that live elsewhere stay there."""
        self._undo.close()
        self._log()
        if self._limited is not None:
            lift_memory_limit(self._device)

    def note(self, **status: Any) -> None:
        """Write how far training has come, for the command that has started it."""
        if path := os.environ.get(STATUS_VARIABLE):
            Path(path).write_text(json.dumps({"is_settled": self._is_settled, **status}), encoding="utf-8")

    # ---------------------------------------------------------------------------------------------- before a step

    @property
    def _memory(self) -> LimitedMemory:
        assert self._limited is not None, "an accelerator is watched"
        return self._limited

    @property
    def _limit_bytes(self) -> int:
        """Return the bytes that decisions count on; the rest is for what they do not foresee."""
        return int(USABLE * self._memory.limit_bytes)

    @property
    def _home(self) -> Home:
        return "file" if self._device.type == "cpu" else "host"

    def _begin(self, device: torch.device) -> None:
        if self._limited is not None:
            return
        is_numbered = device.type == "cpu" or device.index is not None
        device = device if is_numbered else torch.device(device.type, torch.accelerator.current_device_index())
        self._device = device
        self._limited = limit_memory(device, None if self._memory_gib is None else round(self._memory_gib * GIB))
        for name in ("backward", "grad"):  # which tensors and accelerators call
            reviewed = self._reviewed(getattr(torch.autograd, name))
            self._undo.enter_context(patch.object(torch.autograd, name, reviewed))
        if device.type == "cpu":
            self._disk = self._disk or default_disk()
            map_large_blocks(64 * KIB)
        logger.info(
            "fit: training may take %s on %s, where %s are in use",
            format_bytes(self._memory.limit_bytes),
            device,
            format_bytes(self._memory.read().allocated_bytes),
        )

    def _reviewed(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def backward_and_review(*args: Any, **kwargs: Any) -> Any:
            if in_backward():  # of checkpointed layers
                return backward(*args, **kwargs)
            for model in self._models:
                if model.loop is not None:
                    model.loop.close()
            result = backward(*args, **kwargs)
            if self._models:
                self._num_passes += 1
                self._review()
            return result

        return backward_and_review

    def _take_model(self, module: nn.Module, accelerator: Accelerator) -> None:
        """Decide by sizes about a model that is to be prepared, if it trains."""
        trainer = self._trainers.get(accelerator)
        is_trained = any(each.requires_grad for each in module.parameters()) and not self.is_making_trainer
        is_evaluated = trainer is not None and not trainer.is_in_train
        if is_evaluated or not is_trained or any(each.module is module for each in self._models):
            return
        offloader = ActivationOffloader(
            max_slowdown=_ANY_SLOWDOWN,
            offload_threshold_mb=_SMALL_THRESHOLD_MB if self.is_tight else _THRESHOLD_MB,
            host_budget_gib=self._host_budget_gib,
            disk=self._disk,
            disk_budget_gib=self._disk_budget_gib,
        )
        model = _Model(module, accelerator, trainer, offloader)
        sizes = _Sizes(module, self._device)
        needed = self._memory.read().allocated_bytes + sizes.coming_bytes + sizes.gradient_bytes
        over = needed + max(_LEAST_ROOM_BYTES, 2 * sizes.largest_bytes) - self._limit_bytes
        if self.is_tight or over > 0:
            self._stream(model, trained=self.is_tight or over > sizes.frozen_bytes)
        if model.trainer is not None:
            self._place_frozen(model.trainer, is_short=self.is_tight or over > 0)
            model.undo.callback(OffloadedLoss(model.trainer, offloader).remove)
        else:
            model.loop = OffloadedLoop(module, offloader)
        self._models.append(model)
        for state in self._states:
            self._adopt(state)

    def _stream(self, model: _Model, *, trained: bool, budget_bytes: int | None = None) -> None:
        """Let weights of a model live at home from now on, unless it refuses that."""
        weights_bytes = sum(each.nbytes for each in model.module.parameters())
        host_bytes = available_bytes() if self._host_budget_gib is None else self._host_budget_gib * GIB
        is_file = self._device.type == "cpu" or 2 * weights_bytes > host_bytes
        try:
            model.weights = StreamedWeights(
                model.module,
                home="file" if is_file else "host",
                trained=trained,
                budget_gib=None if budget_bytes is None else budget_bytes / GIB,
                device=self._device,
                disk=self._disk,
            )
        except ValueError as error:
            logger.info("fit: weights stay: %s", error)
            return
        self._memory.restart()  # what they took before does not count
        if model.trainer is not None:
            model.undo.callback(StreamedBase(model.trainer, model.weights).remove)
        else:
            model.undo.callback(enclose_calls_of(model.module, model.weights.stream))
        logger.info("fit: %s live in %s", "weights" if trained else "frozen weights", _PLACES[model.weights.home])

    def _place_frozen(self, trainer: Trainer, *, is_short: bool) -> None:
        """Move models that a trainer has prepared to be called alone to the device, or let them visit it."""
        modules = frozen_modules(trainer).values() if trainer not in self._frozen else ()
        frozen_bytes = sum(_Sizes(each, self._device).own_bytes for each in modules)
        room = self._limit_bytes - self._memory.read().allocated_bytes
        if frozen_bytes and (is_short or (self._device.type != "cpu" and frozen_bytes > room)):
            self._move_frozen_models(trainer)
        else:
            for each in modules:
                each.to(self._device)

    def _move_frozen_models(self, trainer: Trainer) -> None:
        try:
            self._frozen[trainer] = FrozenModels(trainer, "auto", self._home)
            logger.info("fit: %s live in %s", " and ".join(self._frozen[trainer].visits), _PLACES[self._home])
        except ValueError as error:
            logger.info("fit: frozen models stay: %s", error)

    def _take_optimizer(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, AcceleratedOptimizer):
            return
        state = _State(optimizer)
        self._states.append(state)
        self._adopt(state)

        def note_update(*args: Any) -> None:
            state.has_stepped = True
            self._review()

        self._undo.callback(optimizer.register_step_post_hook(note_update).remove)

    def _adopt(self, state: _State) -> None:
        """Let the updates of an optimizer visit weights that stream."""
        for model in self._models:
            weights = model.weights
            if weights is not None and weights.trained and set(state.parameters) & set(model.module.parameters()):
                state.home = weights.adopt(state.plain)

    # ---------------------------------------------------------------------------------------------- between steps

    def _review(self) -> None:
        """Decide with what the passes so far have shown."""
        self._begun_s = self._begun_s or time.monotonic()
        if self._is_settled and self._memory.highest_bytes <= self._memory.limit_bytes + _TOLERATED_BYTES:
            return
        for state in self._states:
            self._measure(state)
        accumulates = any(each.accelerator.gradient_accumulation_steps > 1 for each in self._models)
        # State visits once in an update, and saved activations in each of its passes.
        self._move_state(max(self._over_update(), self._over_pass() if accumulates else 0))
        if not self._offloads and self._over_pass() > 0:
            self._offloads = True
            logger.info("fit: saved activations leave for %s", _PLACES[self._home])
        self._move_state(self._over_pass())
        self._move_frozen(max(self._over_pass(), self._over_update()))
        over = max(self._over_pass(), self._over_update()) + self._limit_bytes - self._memory.limit_bytes
        has_learned = self._num_passes >= _PASSES_TO_LEARN and all(each.has_stepped for each in self._states)
        if over > 0 and self._is_settled:  # whoever enforces the limit ends it
            warning_once(logger, "fit: %s", self._message(over))
        elif over > 0 and (has_learned or not self.is_tight):
            raise DoesNotFitError(self._message(over))
        if has_learned:
            self._settle()

    def _over_pass(self) -> int:
        """Return the bytes by which a forward and backward pass exceeds the limit."""
        stays = 0 if self._offloads else sum(_could_stay(each.offloader) for each in self._models)
        return self._memory.highest_bytes + stays + sum(each.coming_bytes for each in self._states) - self._limit_bytes

    def _over_update(self) -> int:
        """Return the bytes by which an update exceeds the limit."""
        coming = sum(each.coming_bytes for each in self._states)
        temporary = max((each.update_bytes for each in self._states if not each.has_stepped), default=0)
        return self._memory.read().allocated_bytes + coming + temporary - self._limit_bytes

    def _measure(self, state: _State) -> None:
        """Find out how many bytes of state an optimizer makes, and whether they may live elsewhere."""
        if state.sizes or state.home is not None or not state.is_movable:
            return
        try:
            state.sizes = OffloadedOptimizer(state.plain, self._home, disk=self._disk).state_sizes(state.parameters)
        except ValueError as error:
            state.is_movable = False
            logger.info("fit: the optimizer's state stays: %s", error)

    def _move_state(self, over_bytes: int) -> None:
        """Move the state of optimizers, the largest first, as far as needed."""
        for state in sorted(self._states, key=lambda each: -each.resident_bytes):
            resident_bytes = state.resident_bytes
            if over_bytes > 0 and resident_bytes:
                stays = max(0, resident_bytes - over_bytes)
                state.home = OffloadedOptimizer(state.plain, self._home, stays / GIB, self._disk)
                state.home.redirect()
                over_bytes -= resident_bytes
                if state.has_stepped:
                    self._memory.restart()
                left, kind = format_bytes(resident_bytes - stays), type(state.plain).__name__
                logger.info("fit: %s of %s's state live in %s", left, kind, _PLACES[self._home])

    def _move_frozen(self, over_bytes: int) -> None:
        """Let frozen models visit, and frozen weights stream as far as needed."""
        for model in self._models:
            if over_bytes > 0 and model.trainer is not None and model.trainer not in self._frozen:
                modules = frozen_modules(model.trainer).values()
                over_bytes -= sum(_Sizes(each, self._device).own_bytes for each in modules)
                if modules:
                    self._move_frozen_models(model.trainer)
                    self._memory.restart()
            if over_bytes > 0 and model.weights is None:
                frozen_bytes = _Sizes(model.module, self._device).frozen_bytes
                if frozen_bytes:
                    self._stream(model, trained=False, budget_bytes=max(0, frozen_bytes - over_bytes))
                    over_bytes -= frozen_bytes

    def _settle(self) -> None:
        """Leave a training that fits alone, until it does no more."""
        is_first, self._is_settled = not self._is_settled, True
        self.note()
        for model in self._models:
            model.offloader.enabled = self._offloads
        waited_s = sum(_waited_s(each) for each in self._models)
        waited_s += sum(each.home.report().stall_ms / 1e3 for each in self._states if each.home is not None)
        share = waited_s / max(1e-9, time.monotonic() - self._begun_s - waited_s)
        if self._max_waiting is not None and share > self._max_waiting:
            raise DoesNotFitError(
                f"training waits for {share:.0%} of the time in which it computes, and may for "
                f"{self._max_waiting:.0%}; give it more --memory, or a larger --max-slowdown"
            )
        is_plain = not self._offloads and not any(each.home for each in self._states) and not self._frozen
        if is_first and is_plain and not any(each.weights for each in self._models):
            if self._device.type == "cpu":
                map_large_blocks(32 * MIB)
            logger.info("fit: everything fits; from now on nothing is changed")

    def _message(self, over_bytes: int) -> str:
        smallest = (self._memory.limit_bytes + over_bytes) / USABLE
        return (
            f"training needs {format_bytes(smallest)}, and may take {format_bytes(self._memory.limit_bytes)}; give it "
            f"--memory {smallest / MIB:.0f}MiB, or train with a smaller micro-batch or shorter sequences"
        )

    # ---------------------------------------------------------------------------------------------- after training

    def _give_back(self) -> None:
        """Leave a model that has been trained as the plain run does, where there is room for its weights."""
        self._log()
        return_freed_memory()
        for model in self._models:
            room = self._limit_bytes - self._memory.read().allocated_bytes
            if model.weights is not None and model.weights.report().streamed_bytes > room:
                logger.info("fit: weights go on streaming, since memory has no room for all of them")
            elif model.trainer is not None:
                model.undo.close()
                self._models = [each for each in self._models if each is not model]
        self._states.clear()
        self._num_passes, self._is_settled, self._offloads, self._begun_s = 0, False, self.is_tight, 0.0

    def _log(self) -> None:
        if self._num_passes:
            highest, limit = format_bytes(self._memory.total_highest_bytes), format_bytes(self._memory.limit_bytes)
            logger.info("fit: %s of %s were in use at most", highest, limit)
            for line in self._table().lines():
                logger.info("%s", line)

    def _table(self) -> Table:
        """Return where each part lives, and what that costs."""
        rows: list[list[Cell]] = []
        for model in self._models:
            name, stats = type(model.module).__name__, model.offloader.stats_at_peak
            held, plain = (
                None if each is None else 1024 * each for each in (stats.measured_peak_gib, stats.plain_peak_gib)
            )
            home = _PLACES[self._home] if self._offloads else "here"
            moved, written = stats.bytes_moved, stats.disk_bytes_written
            rows.append(_row(f"activations of {name}", home, plain, held, moved, written, stats.stall_ms))
            if model.weights is not None:
                found = model.weights.report()
                written = found.bytes_to_home + found.gradient_bytes[1]
                moved = found.bytes_to_device + found.gradient_bytes[0] + written
                part = f"{'weights' if found.trained else 'frozen weights'} of {name}"
                sizes = found.streamed_bytes / MIB, found.peak_device_bytes / MIB
                rows.append(_row(part, _PLACES[found.home], *sizes, moved, written, found.stall_ms))
        for state in self._states:
            part = f"state of {type(state.plain).__name__}"
            if state.home is not None:
                cost = state.home.report()
                here, moved = cost.resident_bytes + cost.peak_bytes, cost.bytes_read + cost.bytes_written
                sizes = (cost.state_bytes + cost.resident_bytes) / MIB, here / MIB
                rows.append(_row(part, _PLACES[cost.home], *sizes, moved, cost.bytes_written, cost.stall_ms))
            else:
                size = state.resident_bytes / MIB
                rows.append(_row(part, "here", size, size, 0, 0, 0))
        heads = ["part", "lives in", "MiB", "MiB here at most", "MiB moved", "MiB written", "s waited"]
        return Table(heads, rows)


_PLACES = {"host": "host memory", "file": "a file"}


def _row(
    part: str, home: str, mib: float | None, here_mib: float | None, moved: int, written: int, waited_ms: float
) -> list[Cell]:
    return [part, home, mib, here_mib, moved / MIB, written / MIB, waited_ms / 1e3]


class _Sizes:
    """Bytes of a model's weights: those that memory holds and no file, the frozen ones of these, those that come to the
    device, gradients that come, and the largest weight.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        mapped = MappedMemory() if device.type == "cpu" else None
        self.own_bytes = self.frozen_bytes = self.coming_bytes = self.gradient_bytes = self.largest_bytes = 0
        for each in model.parameters():
            num_bytes = each.nbytes
            self.largest_bytes = max(self.largest_bytes, num_bytes)
            found = mapped.range_of(each.data) if mapped is not None else None
            is_in_file = found is not None and not found.is_written
            self.own_bytes += 0 if is_in_file else num_bytes
            if each.requires_grad:
                self.gradient_bytes += 0 if each.grad is not None else num_bytes
            elif not is_in_file:
                self.frozen_bytes += num_bytes
            # A file's pages become the process's own when an update writes them.
            if each.device != device or (is_in_file and each.requires_grad):
                self.coming_bytes += num_bytes


def _could_stay(offloader: ActivationOffloader) -> int:
    """Return the bytes of saved activations that were away at the peak of the last pass."""
    stats = offloader.stats
    if stats.plain_peak_gib is None or stats.measured_peak_gib is None:
        return 0
    return round((stats.plain_peak_gib - stats.measured_peak_gib) * GIB)


def _takes_all(group: dict[str, Any]) -> bool:
    if group.get("fused"):
        return False
    if group.get("foreach") is not None:
        return bool(group["foreach"])
    return "foreach" in group and bool(_default_to_fused_or_foreach(group["params"], False)[1])


def _waited_s(model: _Model) -> float:
    waited_ms = model.offloader.stats.stall_ms
    return (waited_ms + (0.0 if model.weights is None else model.weights.report().stall_ms)) / 1e3


@contextmanager
def fitted(**settings: Any) -> Iterator[Fit]:
    """Decide for every Trainer and every Accelerator that is made inside; `settings` are those of `Fit`."""
    status = os.environ.get(STATUS_VARIABLE)
    fit = Fit(**settings, is_tight=status is not None and Path(status).exists())
    make_trainer, make_accelerator = Trainer.__init__, Accelerator.__init__
    prepare_model = functools.partialmethod(Accelerator.prepare_model, device_placement=False)

    @functools.wraps(make_accelerator)
    def make_and_watch(accelerator: Accelerator, *args: Any, **kwargs: Any) -> None:
        make_accelerator(accelerator, *args, **kwargs)
        fit.watch(accelerator)

    @functools.wraps(make_trainer)
    def make_and_take(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        # Models that may not fit are moved when training begins, if they are moved at all.
        with (
            patch.object(Trainer, "_move_model_to_device", lambda *_: None),
            patch.object(Accelerator, "prepare_model", prepare_model),
        ):
            fit.is_making_trainer = True
            try:
                make_trainer(trainer, *args, **kwargs)
            finally:
                fit.is_making_trainer = False
        fit.take(trainer)

    with patch.object(Accelerator, "__init__", make_and_watch), patch.object(Trainer, "__init__", make_and_take):
        try:
            yield fit
        except DoesNotFitError as error:
            fit.note(ran_out=True)
            is_repeated = status is not None and not fit.is_tight
            raise SystemExit(1 if is_repeated else f"hf-memopt fit: {error}") from error
        except (MemoryError, torch.OutOfMemoryError):
            fit.note(ran_out=True)
            raise
        finally:
            fit.close()
