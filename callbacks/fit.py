"""Decides, while a training runs, where its parts live, so that it fits in the memory that there is.

The decision comes in stages. Before a model is prepared, sizes alone decide whether its weights have room. The first
micro-batch runs with its saved activations away, below what the training needs, and shows what everything else takes.
From then on parts that have room stay. All of them are moved by what `attach` switches on, so that no bit changes.
"""

import functools
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach
from transformers import Trainer

from hf_memopt.activations import ActivationOffloader
from hf_memopt.activations.plan_maker import USABLE
from hf_memopt.activations.wrapped_module import hook_direct_calls, wrapped_module
from hf_memopt.callbacks.attach import OffloadedLoss
from hf_memopt.callbacks.homes import StreamedBase, enclose_calls_of
from hf_memopt.memory.memory_limit import LimitedMemory, lift_memory_limit, limit_memory
from hf_memopt.text_table import Cell, Table
from hf_memopt.transfer.host_memory import map_large_blocks, return_freed_memory
from hf_memopt.transfer.scratch_file import default_disk
from hf_memopt.units import GIB, KIB, MIB, format_bytes
from hf_memopt.weights import OffloadedOptimizer, StreamedWeights
from hf_memopt.weights.base import streamed_weights_of
from hf_memopt.weights.homes.weight_files import MappedMemory

if TYPE_CHECKING:
    from hf_memopt.callbacks.arguments import MemoptArguments

logger = logging.getLogger(__name__)

# Names a file in which the process of the training notes how far it has come, for the command that has started it.
STATUS_VARIABLE = "HF_MEMOPT_FIT_STATUS"
# Storages of saved activations that may move, in MiB; smaller ones where everything has to be away.
_THRESHOLD_MB, _SMALL_THRESHOLD_MB = 1.0, 0.0625
# Passes until plans of saved activations hold: two that are recorded, one that follows the plan.
_PASSES_TO_LEARN = 3
# Room that a step needs beyond weights and gradients, at the least.
_LEAST_ROOM_BYTES = 64 * MIB
_ENGINES = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


class DoesNotFitError(RuntimeError):
    """Training needs more memory than the limit allows."""


@dataclass
class _Model:
    """A model that trains: the objects by which its parts live elsewhere."""

    module: nn.Module
    accelerator: Accelerator
    offloader: ActivationOffloader
    weights: StreamedWeights | None = None
    undo: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class _State:
    """An optimizer, and where its state lives."""

    plain: Optimizer
    accelerator: Accelerator
    home: OffloadedOptimizer | None = None
    sizes: dict[torch.Tensor, int] = field(default_factory=dict)
    has_stepped: bool = False

    @property
    def coming_bytes(self) -> int:
        """Return the bytes of state that the first update will make on the device."""
        return 0 if self.has_stepped or self.home is not None else sum(self.sizes.values())

    @property
    def update_bytes(self) -> int:
        """Return the temporary memory of an update: a copy of all weights where it takes them at once."""
        largest = max((each.nbytes for each in self.sizes), default=0)
        takes_all = self.home is None and any(_takes_all(group) for group in self.plain.param_groups)
        return sum(each.nbytes for each in self.sizes) if takes_all else 2 * largest


class Fit:
    """The decisions for the trainings of one process.

    Args:
        arguments: with `fit`; the limits among them count.
        is_tight: whether all parts are away from the start.

    Raises:
        ValueError: several processes train together, or the device has no such limit.
    """

    def __init__(self, arguments: "MemoptArguments", *, is_tight: bool = False) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "fit decides for one process, and WORLD_SIZE is greater than 1; use hf-memopt plan for several GPUs, "
                "and FSDP or DeepSpeed"
            )
        self._arguments, self._is_tight = arguments, is_tight
        self._disk = arguments.disk
        self._memory: LimitedMemory | None = None
        self._trainers: weakref.WeakKeyDictionary[Accelerator, Trainer] = weakref.WeakKeyDictionary()
        self._models: list[_Model] = []
        self._states: list[_State] = []
        self._num_passes = self._num_updates = 0
        self._offloads = is_tight  # whether saved activations have to leave
        self._is_settled = False
        self._predicted_bytes: int | None = None
        self._undo: list[Callable[[], None]] = []

    def take(self, trainer: Trainer) -> None:
        """Decide for the training runs of a trainer, whose accelerator is watched."""
        self._trainers[trainer.accelerator] = trainer
        train = trainer.train

        @functools.wraps(train)
        def train_and_give_back(*args: Any, **kwargs: Any) -> Any:
            result = train(*args, **kwargs)
            self._give_back()
            return result

        trainer.train = train_and_give_back
        self._undo.append(functools.partial(delattr, trainer, "train"))

    def watch(self, accelerator: Accelerator) -> None:
        """Decide for all that an accelerator prepares from now on."""
        if accelerator.distributed_type in _ENGINES:
            engine = accelerator.distributed_type.value
            raise ValueError(f"fit: {engine} places weights and optimizer states already; leave fit out")
        self._begin(accelerator.device)
        prepare, backward = accelerator.prepare, accelerator.backward

        @functools.wraps(prepare)
        def prepare_and_place(*args: Any, **kwargs: Any) -> Any:
            self._place(accelerator, args)
            prepared = prepare(*args, **kwargs)
            self._wrap(prepared if isinstance(prepared, tuple) else (prepared,))
            return prepared

        @functools.wraps(backward)
        def backward_and_review(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            self._num_passes += 1
            self._review()

        accelerator.prepare, accelerator.backward = prepare_and_place, backward_and_review

        def undo() -> None:
            del accelerator.prepare, accelerator.backward

        self._undo.append(undo)

    def close(self) -> None:
        """Log what was done, and lift the limit."""
        for undo in self._undo:
            undo()
        if self._memory is not None:
            self._log()
            lift_memory_limit(self._device)

    def _log(self) -> None:
        if self._num_passes:
            for line in self.lines():
                logger.info("%s", line)

    def _give_back(self) -> None:
        """Leave a model that has been trained as the plain run does, where there is room for its weights."""
        assert self._memory is not None
        self._log()
        return_freed_memory()
        for model in self._models:
            weights = model.weights
            room = self._limit_bytes - self._memory.read().allocated_bytes
            if weights is not None and weights.report().streamed_bytes > room:
                logger.info("fit: the weights go on streaming, since memory has no room for all of them")
                continue
            for undo in model.undo:
                undo()
        self._models = [each for each in self._models if each.weights is not None and streamed_weights_of(each.module)]
        self._states.clear()
        self._num_passes, self._is_settled, self._offloads = 0, False, self._is_tight

    @property
    def _limit_bytes(self) -> int:
        assert self._memory is not None
        return int(USABLE * self._memory.limit_bytes)

    def _begin(self, device: torch.device) -> None:
        if self._memory is not None:
            return
        self._device = device
        gib = self._arguments.memory_gib
        self._memory = limit_memory(device, None if gib is None else round(gib * GIB))
        if device.type == "cpu":
            self._disk = self._disk or default_disk()
            map_large_blocks(64 * KIB)
        logger.info(
            "fit: training may take %s of %s memory, of which %s are in use",
            format_bytes(self._memory.limit_bytes),
            "this machine's" if device.type == "cpu" else f"{device}'s",
            format_bytes(self._memory.read().allocated_bytes),
        )

    def _place(self, accelerator: Accelerator, prepared: Sequence[Any]) -> None:
        """Decide by sizes about models that are to be prepared, and take their optimizers."""
        for each in prepared:
            if isinstance(each, nn.Module) and _trained(each) and not any(each is known.module for known in self._models):
                self._take_model(each, accelerator)
        for each in prepared:
            if isinstance(each, Optimizer) and not isinstance(each, AcceleratedOptimizer):
                self._take_optimizer(each, accelerator)

    def _take_model(self, model: nn.Module, accelerator: Accelerator) -> None:
        assert self._memory is not None
        threshold = _SMALL_THRESHOLD_MB if self._is_tight else _THRESHOLD_MB
        offloader = ActivationOffloader(
            max_slowdown=0.0,
            offload_threshold_mb=threshold,
            host_budget_gib=self._arguments.host_budget_gib,
            disk=self._disk,
            disk_budget_gib=self._arguments.disk_budget_gib,
        )
        taken = _Model(model, accelerator, offloader)
        self._models.append(taken)
        sizes = _Sizes(model, self._device)
        needed = self._memory.read().allocated_bytes + sizes.coming_bytes + sizes.gradient_bytes
        needed += max(_LEAST_ROOM_BYTES, 2 * sizes.largest_bytes)
        if self._is_tight or needed > self._limit_bytes:
            frees_enough = not self._is_tight and needed - sizes.frozen_bytes <= self._limit_bytes
            self._stream(taken, trained=not frees_enough)
        trainer = self._trainers.get(accelerator)
        if trainer is not None:
            taken.undo.append(OffloadedLoss(trainer, offloader).remove)

    def _stream(self, model: _Model, *, trained: bool, budget_bytes: int | None = None) -> bool:
        """Let weights of a model live at home from now on; return whether they do."""
        assert self._memory is not None
        try:
            model.weights = StreamedWeights(
                model.module,
                home="file" if self._device.type == "cpu" else "auto",
                trained=trained,
                budget_gib=None if budget_bytes is None else budget_bytes / GIB,
                device=self._device,
                disk=self._disk,
            )
        except ValueError as error:
            logger.info("fit: weights stay: %s", error)
            return False
        self._memory.restart()  # what they took before does not count
        trainer = self._trainers.get(model.accelerator)
        if trainer is not None:
            model.undo.append(StreamedBase(trainer, model.weights).remove)
        else:
            enclose_calls_of(model.module, model.weights.stream)
        return True

    def _take_optimizer(self, optimizer: Optimizer, accelerator: Accelerator) -> None:
        state = _State(optimizer, accelerator)
        self._states.append(state)
        parameters = {each for group in optimizer.param_groups for each in group["params"]}
        for model in self._models:
            if model.weights is not None and model.weights.trained and parameters & set(model.module.parameters()):
                state.home = model.weights.adopt(optimizer)

        def note(*args: Any) -> None:
            if not state.has_stepped:
                state.has_stepped = True
                self._num_updates += 1
                self._note_status()
            self._review()

        optimizer.register_step_post_hook(note)

    def _wrap(self, prepared: Sequence[Any]) -> None:
        """Offload what the forward passes of models save that no trainer runs."""
        modules = [each for each in prepared if isinstance(each, nn.Module)]
        for model in self._models:
            is_prepared = any(model.module is each or getattr(each, "module", None) is model.module for each in modules)
            if is_prepared and model.accelerator not in self._trainers and wrapped_module(model.module) is None:
                model.offloader.wrap(model.module)
                hook_direct_calls(model.module)

    def _review(self) -> None:
        """Decide again with what the passes so far have shown; parts only leave."""
        assert self._memory is not None
        if self._is_settled:
            return
        for state in self._states:
            if not state.sizes and not state.has_stepped and state.home is None:
                self._measure(state)
        accumulates = max(each.accelerator.gradient_accumulation_steps for each in self._models) > 1
        over_update, over_pass = self._over_update(), self._over_pass()
        if over_update > 0 or (accumulates and over_pass > 0):
            self._move_state(max(over_update, over_pass if accumulates else 0))
        self._offloads = self._offloads or self._over_pass() > 0
        self._move_state(self._over_pass())
        self._move_frozen(max(self._over_pass(), self._over_update()))
        over = max(self._over_pass(), self._over_update()) - (self._memory.limit_bytes - self._limit_bytes)
        if over > 0 and not self._is_tight:
            raise DoesNotFitError(self._message(over))
        if self._num_passes >= _PASSES_TO_LEARN and all(each.has_stepped for each in self._states):
            self._settle(over)

    def _over_pass(self) -> int:
        """Return the bytes by which a forward and backward pass exceeds the limit."""
        assert self._memory is not None
        stays = 0 if self._offloads else sum(_could_stay(each.offloader) for each in self._models)
        return self._memory.highest_bytes + stays + sum(each.coming_bytes for each in self._states) - self._limit_bytes

    def _over_update(self) -> int:
        """Return the bytes by which an update exceeds the limit."""
        assert self._memory is not None
        coming = sum(each.coming_bytes for each in self._states)
        temporary = max((each.update_bytes for each in self._states if not each.has_stepped), default=0)
        return self._memory.read().allocated_bytes + coming + temporary - self._limit_bytes

    def _measure(self, state: _State) -> None:
        try:
            home = OffloadedOptimizer(state.plain, self._home(), disk=self._disk)
        except ValueError as error:
            logger.info("fit: the optimizer's state stays: %s", error)
            return
        state.sizes = home.state_sizes(each for group in state.plain.param_groups for each in group["params"])

    def _move_state(self, over_bytes: int) -> None:
        """Move the state of optimizers that have made no update, the largest first, as far as needed."""
        for state in sorted(self._states, key=lambda each: -each.coming_bytes):
            coming = state.coming_bytes
            if over_bytes > 0 and coming:
                stays = max(0, coming - over_bytes)
                state.home = OffloadedOptimizer(state.plain, self._home(), stays / GIB, self._disk)
                state.home.redirect()
                over_bytes -= coming

    def _move_frozen(self, over_bytes: int) -> None:
        """Let frozen weights stream as far as needed."""
        assert self._memory is not None
        for model in self._models:
            if over_bytes <= 0 or model.weights is not None:
                continue
            frozen = _Sizes(model.module, self._device).frozen_bytes
            if frozen and self._stream(model, trained=False, budget_bytes=max(0, frozen - over_bytes)):
                over_bytes -= frozen

    def _home(self) -> Any:
        return "file" if self._device.type == "cpu" else "host"

    def _settle(self, over_bytes: int) -> None:
        """Leave a training that fits alone, and end one that does not."""
        self._is_settled = True
        if over_bytes > 0:
            raise DoesNotFitError(self._message(over_bytes))
        if not self._offloads:
            for model in self._models:
                model.offloader.enabled = False
        if not self._offloads and not any(each.home for each in self._states) and not any(
            each.weights for each in self._models
        ):
            if self._device.type == "cpu":
                map_large_blocks(32 * MIB)
            logger.info("fit: everything fits; nothing is changed from now on")

    def _message(self, over_bytes: int) -> str:
        assert self._memory is not None
        smallest = (self._memory.limit_bytes + over_bytes) / USABLE
        return (
            f"training needs {format_bytes(smallest)}, and may take {format_bytes(self._memory.limit_bytes)}; give it "
            f"--memory {smallest / MIB:.0f}MiB, a smaller micro-batch or shorter sequences"
        )

    def _note_status(self, **status: Any) -> None:
        path = os.environ.get(STATUS_VARIABLE)
        if path:
            Path(path).write_text(json.dumps({"num_updates": self._num_updates, **status}), encoding="utf-8")

    def lines(self) -> Iterator[str]:
        """Return what was decided and measured, as text."""
        assert self._memory is not None
        limit = format_bytes(self._memory.limit_bytes)
        yield f"fit: {format_bytes(self._memory.total_highest_bytes)} of {limit} at most, after {self._num_passes} passes"
        rows: list[list[Cell]] = []
        for model in self._models:
            stats, name = model.offloader.stats_at_peak, type(model.module).__name__
            held = stats.measured_peak_gib
            rows.append(
                [
                    f"activations of {name}",
                    "offloaded" if self._offloads else "stay",
                    None if held is None else f"{held * 1024:.1f}",
                    f"{stats.bytes_moved / MIB:.0f}",
                    f"{stats.disk_bytes_written / MIB:.0f}",
                    f"{stats.stall_ms / 1e3:.1f}",
                ]
            )
            if model.weights is not None:
                report = model.weights.report()
                written = report.bytes_to_home + report.gradient_bytes[1]
                rows.append(
                    [
                        f"{'weights' if report.trained else 'frozen weights'} of {name}",
                        report.home,
                        f"{report.peak_device_bytes / MIB:.1f}",
                        f"{(report.bytes_to_device + written) / MIB:.0f}",
                        f"{written / MIB:.0f}",
                        f"{report.stall_ms / 1e3:.1f}",
                    ]
                )
        for state in self._states:
            if state.home is not None:
                cost = state.home.report()
                moved = cost.bytes_read + cost.bytes_written
                rows.append(
                    [
                        f"state of {type(state.plain).__name__}",
                        cost.home,
                        f"{(cost.resident_bytes + cost.peak_bytes) / MIB:.1f}",
                        f"{moved / MIB:.0f}",
                        f"{cost.bytes_written / MIB:.0f}",
                        f"{cost.stall_ms / 1e3:.1f}",
                    ]
                )
        yield from str(Table(["part", "where", "MiB here", "moved MiB", "written MiB", "waited s"], rows)).splitlines()


class _Sizes:
    """Bytes of a model's weights."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        mapped = MappedMemory() if device.type == "cpu" else None
        self.coming_bytes = self.gradient_bytes = self.frozen_bytes = self.largest_bytes = 0
        for each in model.parameters():
            num_bytes = each.nbytes
            self.largest_bytes = max(self.largest_bytes, num_bytes)
            found = mapped.range_of(each.data) if mapped is not None else None
            is_elsewhere = each.device != device or (found is not None and not found.is_written)
            if each.requires_grad:
                self.gradient_bytes += 0 if each.grad is not None else num_bytes
            elif not (found is not None and device.type == "cpu"):
                self.frozen_bytes += num_bytes
            # A file's pages become the process's own when an update writes them.
            if is_elsewhere and (each.requires_grad or device.type != "cpu"):
                self.coming_bytes += num_bytes


def _trained(model: nn.Module) -> bool:
    return any(each.requires_grad for each in model.parameters())


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


@contextmanager
def fitted(arguments: "MemoptArguments") -> Iterator[Fit]:
    """Decide for every Trainer and every Accelerator that is made inside."""
    status = Path(os.environ[STATUS_VARIABLE]) if STATUS_VARIABLE in os.environ else None
    fit = Fit(arguments, is_tight=status is not None and status.exists())
    make_trainer, make_accelerator = Trainer.__init__, Accelerator.__init__

    @functools.wraps(make_accelerator)
    def make_and_watch(accelerator: Accelerator, *args: Any, **kwargs: Any) -> None:
        make_accelerator(accelerator, *args, **kwargs)
        fit.watch(accelerator)

    @functools.wraps(make_trainer)
    def make_and_take(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        # A model that may not fit is moved when it is prepared, if it is moved at all.
        with patch.object(Trainer, "_move_model_to_device", lambda *_: None):
            make_trainer(trainer, *args, **kwargs)
        fit.take(trainer)

    with (
        patch.object(Accelerator, "__init__", make_and_watch),
        patch.object(Trainer, "__init__", make_and_take),
    ):
        try:
            yield fit
        except (DoesNotFitError, MemoryError, torch.OutOfMemoryError):
            fit._note_status(ran_out=True)
            raise
        finally:
            fit.close()
