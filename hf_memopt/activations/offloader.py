"""Moves saved activations to host memory or a disk, and back in time for backward."""

import functools
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch._logging._internal import warning_once

from hf_memopt.activations.offloaded_pass import OffloadedPass, PassFigures
from hf_memopt.activations.pass_planner import PassPlanner
from hf_memopt.activations.plan_maker import OffloadLimits, room_on
from hf_memopt.activations.planner.offload_plan import OffloadReport, plan_report
from hf_memopt.activations.recompute.op_tracer import OpTracer, active_in, in_dual_level, off_in_dual_levels
from hf_memopt.activations.saved_tensor_hooks import SavedTensorHooks, storages_of
from hf_memopt.activations.saved_tensors.device_state import DeviceState, PassCurve
from hf_memopt.activations.skipped_modules import Skip, SkippedModules
from hf_memopt.activations.stats import OffloadCounters, OffloadStats
from hf_memopt.activations.wrapped_module import WrappedModule
from hf_memopt.autograd_state import forget_failed_backward
from hf_memopt.ranges import COUNT_OR_ZERO, NOT_NEGATIVE
from hf_memopt.transfer import Copier, SyncCopier
from hf_memopt.transfer.backends import backend_of
from hf_memopt.transfer.disk_space import TierFile
from hf_memopt.transfer.host_memory import map_large_blocks
from hf_memopt.transfer.memories_below import default_host_budget, memories_below
from hf_memopt.transfer.scratch_file import check_disk
from hf_memopt.uncompiled import graph_break, uncompiled
from hf_memopt.units import GIB, MIB, format_bytes

logger = logging.getLogger(__name__)

# By device and thread.
Planners = dict[tuple[torch.device, int], PassPlanner]

MODES = ("auto", "all", "inputs")
_NOTHING_TO_MOVE = (
    "nothing is moved: saved activations are in host memory already. disk=FOLDER moves them to a disk. To try "
    "offloading on a CPU, give the copier that copies there too, ActivationOffloader(copier=hf_memopt.SyncCopier()) or "
    "the flag --cpu_copies"
)


class ActivationOffloader:
    """Moves tensors that autograd saves for backward down a memory, exactly, and brings them back ahead of their use.

    That memory is the host's and, with `disk`, a file below it. Where a device computes in host memory, as a CPU does,
    the file is the only one, and budgets are in RAM.

    Gradients are bitwise those of the plain run: each storage is copied once, byte for byte, however many views of it
    are saved, and views come back with their strides, offsets and lazy conjugation; a storage that is computed again
    comes from the same operation and bytes. Weights, buffers, their views and casts never move, nor do other leaves
    that require grad, tensors of unknown subclasses and layouts, and tensors that a backward saves for itself.

    Args:
        enabled: False makes every method a pass-through.
        offload_threshold_mb: storages smaller than this many MiB stay on the device.
        prefetch_ahead: storages that backward brings back ahead of their use, in the order of last time, counted in
            bytes of the largest one. 0 fetches each one when it is needed.
        pin_memory: use page-locked host memory. False copies more slowly and blocks the host.
        budget_gib: mode "auto" only. Saved activations above the threshold never hold more device memory than this, at
            the least predicted time.
        max_slowdown: mode "auto" without a budget. The smallest peak whose predicted step takes at most this share
            longer than the plain one; on an accelerator without room for it, the fastest plan that fits, and if none
            does everything is offloaded.
        host_budget_gib: host memory to use at most; storages without room there go to the disk, or stay on the device.
            None: nine tenths of the memory available when the first tensor is offloaded.
        disk: a folder on a local disk, for a file that never has a name and goes with the process. Above all each step
            writes to it: `report()` says how much. On a device with memory of its own, a quarter of the host's budget,
            at most 4 GiB, is for bytes on their way, and larger storages do not go.
        disk_budget_gib: length of the file at most. None: no limit but the disk's.
        mode: "all" offloads every storage above the threshold. "inputs" offloads the inputs of regions under activation
            checkpointing and nothing else. "auto" records the first two passes, offloading everything, and plans from
            the second pass on which storages to keep, to offload and to compute again.
        skip: modules whose saved tensors stay on the device, where a budget counts them, with all modules inside:
            module objects, classes, and patterns, with the wildcards of `fnmatch`, of names that end so or of class
            names. Inside of a compiled graph no modules are told apart.
        copier: how bytes move. None: side streams on an accelerator, and nothing to do on the CPU. `SyncCopier()` makes
            a CPU run every step of an offloaded run.

    A pass is everything that one context saves, with any number of backwards through it. Contexts that follow each
    other without a backward in between share a pass and one plan, whatever their models. Where passes overlap
    otherwise, the budget still holds for all together: later ones offload more than planned, and plans become smaller
    until it does. Without a budget the process's peak memory counters are reset in the two recorded passes. An
    `OutOfMemoryError` in a planned pass makes the next plan smaller. Threads may share an offloader: each has passes
    and plans of its own.

    Raises:
        ValueError: an option is out of range, or set without the mode that reads it; `disk` is no folder.
        DiskError: from a context or a backward: the file could not be made, read or written. The next step tries again.
        InfeasibleBudgetError: from the second `offload_context` on: the budget cannot be met; says which could. Each
            rank decides alone, and its error names it.

    Limits: only the innermost pair of saved-tensor hooks runs: do not stack this on another offloader; regions under
    activation checkpointing show only their inputs. Tensors that a custom autograd function stores on its context by
    itself are not seen, nor are writes to saved tensors behind autograd's back (`.data`, NumPy). `torch.func` and hooks
    on saved tensors do not work inside a context, as with any saved-tensor hooks.
    """

    def __init__(
        self,
        enabled: bool = True,
        offload_threshold_mb: float = 10.0,
        prefetch_ahead: int = 2,
        pin_memory: bool = True,
        budget_gib: float | None = None,
        max_slowdown: float = 0.03,
        host_budget_gib: float | None = None,
        mode: str = "auto",
        disk: str | os.PathLike[str] | None = None,
        disk_budget_gib: float | None = None,
        skip: Skip = (),
        copier: Copier | None = None,
    ) -> None:
        self._options = {name: value for name, value in locals().items() if name != "self"}
        for field in ("offload_threshold_mb", "budget_gib", "max_slowdown", "host_budget_gib", "disk_budget_gib"):
            NOT_NEGATIVE.check(field, self._options[field])
        COUNT_OR_ZERO.check("prefetch_ahead", prefetch_ahead)
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is unknown; use one of {', '.join(MODES)}")
        if budget_gib is not None and mode != "auto":
            raise ValueError(f'budget_gib={budget_gib} needs mode="auto"; mode={mode!r} makes no plan')
        check_disk(disk, disk_budget_gib)
        self.enabled, self.mode = enabled, mode
        self._threshold_bytes = max(1, round(offload_threshold_mb * MIB))
        self._pin_memory = pin_memory
        self._skip = SkippedModules(skip)
        self._given_copier = copier
        self._limits = OffloadLimits(_bytes(budget_gib), max_slowdown, prefetch_ahead)
        self._host_budget_bytes = _bytes(host_budget_gib)
        self._disk, self._disk_budget_bytes = disk, _bytes(disk_budget_gib)
        self._file: TierFile | None = None
        self._opened_by: Callable[..., TierFile | None] | None = None
        # Guards all that follows. Destructors do not take it: its holder may be waiting for the thread they run on.
        self._lock = threading.RLock()
        self._devices: dict[torch.device, DeviceState | None] = {}
        self._planners = weakref.WeakKeyDictionary[nn.Module, Planners]()
        self._no_model = nn.Module()  # stands for it, as a key
        self._idle: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._counters = OffloadCounters()
        self._ended: OffloadedPass | None = None
        self._largest: PassFigures | None = None

    @graph_break
    @contextmanager
    @uncompiled
    def offload_context(self, model: nn.Module | None = None) -> Iterator["ActivationOffloader"]:
        """Offload tensors saved for backward inside. Backward may run inside the context or after it.

        Entered in a backward, as around a forward pass of gradient caching, it offloads for another one within.

        Does nothing where gradients are disabled on entry, or a CUDA graph is being captured.

        Args:
            model: its parameters and buffers are never moved, and its passes have a plan of their own. Without it
                weights are recognised where autograd shows them as parameters, which casts and sharded weights do not.
        """
        if not self.enabled or not torch.is_grad_enabled() or _is_captured() or self._rests(model):
            yield self
            return
        fixed = storages_of(model)
        with self._lock:
            self._drop_what_failed()
            for device in filter(None, self._devices.values()):
                device.raise_failure()
            owner, begun = self._open_pass() or (self._key(model), None)
            if begun is None:
                # Each rank by itself: ranks owe each other no equal number of passes.
                for planner in self._planners_of(owner):
                    planner.review()
                op_tracer = self._op_tracer(model, owner, fixed)
            else:
                op_tracer = begun.op_tracer
                if begun.recorder is not None:
                    begun.recorder.name_modules(model)
                if op_tracer is not None:
                    op_tracer.weights |= fixed
        hooks = SavedTensorHooks(
            self._threshold_bytes,
            fixed,
            lambda device: self._begin_pass(owner, device, op_tracer),
            self._counters,
            self._lock,
            inputs_only=self.mode == "inputs",
            leave_node=None if op_tracer is None else op_tracer.leave_node,
            is_skipped=self._skip.among(model),
        )
        try:
            with hooks, self._noting(op_tracer, owner, model):
                yield self
        except BaseException as error:
            for planner in self._planners_of(owner):
                planner.break_off(ran_out=isinstance(error, torch.OutOfMemoryError))
            raise
        if op_tracer is not None and begun is None and not hooks.has_begun:
            self._note_idle(owner)

    def wrap(self, model: nn.Module) -> WrappedModule:
        """Run every forward of `model` in an `offload_context`; returns a handle whose `remove()` undoes it.

        `model` keeps class, `forward` and state. Copies and pickles are wrapped too, with offloaders of their own.
        """
        return WrappedModule(model, self)

    @property
    def stats(self) -> OffloadStats:
        """Return the bytes moved so far, and the newest pass beside its plan."""
        return self._stats(None if self._ended is None else self._ended.figures())

    @property
    def stats_at_peak(self) -> OffloadStats:
        """Return the same with the largest pass that followed a plan, where the newest may be a small last batch."""
        return self._stats(self._largest)

    @property
    def curve(self) -> PassCurve:
        """Return the device memory of saved activations over the pass of `stats_at_peak`, empty before it has ended."""
        return PassCurve([], 0) if self._largest is None else self._largest.curve

    def _stats(self, ended: PassFigures | None) -> OffloadStats:
        with self._lock:
            self._drop_what_failed()
            devices = [device for device in self._devices.values() if device is not None]
        hosts = [memory for device in devices for memory in device.lower if memory.name == "host"]
        disks = [memory for device in devices for memory in device.lower if memory.name == "disk"]
        plan = ended.plan if ended else None
        return OffloadStats(
            bytes_kept=self._counters.bytes_kept,
            bytes_moved=sum(device.bytes_moved for device in devices),
            bytes_recomputed=self._counters.bytes_recomputed,
            bytes_weights=self._counters.bytes_weights,
            bytes_deduplicated=self._counters.bytes_deduplicated,
            host_bytes_live=sum(memory.bytes_live for memory in hosts),
            host_bytes_pinned=sum(memory.host_bytes_held for memory in (*hosts, *disks)),
            num_host_allocations=sum(memory.num_allocations for memory in hosts),
            disk_bytes_live=sum(memory.bytes_live for memory in disks),
            disk_bytes_held=sum(memory.bytes_held for memory in disks),
            disk_bytes_written=self._file.bytes_written if self._file is not None else 0,
            stall_ms=sum(device.stall_ms() for device in devices),
            predicted_peak_gib=plan.predicted_peak_bytes / GIB if plan else None,
            measured_peak_gib=ended.peak_bytes / GIB if ended else None,
            plain_peak_gib=ended.plain_peak_bytes / GIB if ended else None,
            predicted_step_ms=1e3 * plan.predicted_step_s if plan else None,
            measured_step_ms=1e3 * ended.elapsed_s() if ended else None,
        )

    def report(self) -> OffloadReport:
        """Return the actions of the newest plans by kind of module; printed, it is a table."""
        if self._devices and not any(self._devices.values()):
            return OffloadReport((), _NOTHING_TO_MOVE)
        wear = "" if self._file is None else self._file.wear()
        with self._lock:
            plans = tuple(
                plan_report(planner.plan, planner.recording.owners, planner.recording.sizes)
                for planners in self._planners.values()
                for planner in planners.values()
                if planner.plan and planner.recording
            )
        # The newest plan's model may be gone.
        newest = self._ended
        if not plans and newest is not None and newest.plan is not None and newest.recording is not None:
            plans = (plan_report(newest.plan, newest.recording.owners, newest.recording.sizes),)
        return OffloadReport(plans, "" if plans else self._reason_for_no_plan(), wear)

    def _reason_for_no_plan(self) -> str:
        if self._ended is None and self._counters.largest_small_bytes:
            return f"nothing is moved: {self._too_small()}"
        if self.mode != "auto":
            return f"mode={self.mode!r} makes no plan"
        return "no plan yet (mode='auto'): the offloader makes it from recorded passes"

    def __reduce__(self) -> Any:
        # Memory, streams and recordings belong to one process's graphs. Modules to skip are arguments, so that a copied
        # model's offloader gets the copied ones.
        options = dict(self._options)
        skip = options.pop("skip")
        return functools.partial(_with_skip, **options), (skip,)

    def _drop_what_failed(self) -> None:
        """Give back the memory of a backward that raised."""
        if any(device is not None and device.bytes_live for device in self._devices.values()):
            forget_failed_backward()

    def _rests(self, model: nn.Module | None) -> bool:
        """Return whether hooks alone cost more of a model's passes than `max_slowdown` allows."""
        return any(planner.rests for planner in self._planners_of(self._key(model)))

    def _open_pass(self) -> tuple[nn.Module, OffloadedPass] | None:
        for model in self._planners:
            for planner in self._planners_of(model):
                if planner.open_pass is not None:
                    return model, planner.open_pass
        return None

    def _begin_pass(self, owner: nn.Module, device: torch.device, op_tracer: OpTracer | None) -> OffloadedPass | None:
        state = self._state_of(device)
        if state is None:
            return None
        if self.mode != "auto":
            return OffloadedPass(state, self._limits.prefetch_ahead, self._counters, on_end=self._note_end)
        planners, key = self._planners.setdefault(owner, {}), (device, threading.get_ident())
        if key not in planners:
            model = None if owner is self._no_model else owner
            planners[key] = PassPlanner(state, self._limits, self._counters, model, self._note_end, room_on(device))
        return planners[key].open_pass or planners[key].begin_pass(op_tracer)

    def _note_end(self, ended: OffloadedPass) -> None:
        if ended.keeps_all:  # a plain pass is only for comparison
            return
        self._ended = ended
        figures = ended.figures()
        if self._largest is None or figures.rank >= self._largest.rank:
            self._largest = figures

    def _key(self, model: nn.Module | None) -> nn.Module:
        return self._no_model if model is None else model

    def _planners_of(self, owner: nn.Module) -> list[PassPlanner]:
        """Return the planners of a model's passes on this thread."""
        here = threading.get_ident()
        with self._lock:  # other threads add theirs
            return [planner for (_, thread), planner in self._planners.get(owner, {}).items() if thread == here]

    @contextmanager
    def _noting(self, op_tracer: OpTracer | None, owner: nn.Module, model: nn.Module | None) -> Iterator[None]:
        """Note operations, unless a context around this one does, or forward-mode AD is at work."""
        if op_tracer is None or op_tracer.is_noting or in_dual_level():
            yield
            return
        op_tracer.is_noting = True
        try:
            with off_in_dual_levels(op_tracer), self._scope(op_tracer, owner, model):
                yield
        finally:
            op_tracer.is_noting = False

    def _scope(self, op_tracer: OpTracer, owner: nn.Module, model: nn.Module | None) -> AbstractContextManager[object]:
        if op_tracer.clock is not None:
            return _timing(op_tracer)
        makers = set().union(*(planner.makers() for planner in self._planners_of(owner)))
        modules = [maker() if maker is not None else None for maker in makers]
        everywhere = any(module is None or module is model for module in modules)
        return active_in(op_tracer, [module for module in modules if module is not None], everywhere)

    def _op_tracer(self, model: nn.Module | None, owner: nn.Module, fixed: frozenset[int]) -> OpTracer | None:
        state = self._state_of(_device_of(model, self._given_copier))
        if self.mode != "auto" or state is None:
            return None
        planners = self._planners_of(owner)
        if any(planner.is_recording for planner in planners) or (not planners and owner not in self._idle):
            return OpTracer(fixed, state.clock)
        return OpTracer(fixed, None) if any(planner.makers() for planner in planners) else None

    def _note_idle(self, owner: nn.Module) -> None:
        """Nothing saved is large enough: say so once, and do not prepare for recomputing it again."""
        if owner not in self._idle:
            self._idle.add(owner)
            logger.info("activation offloading: %s", self._too_small())

    def _too_small(self) -> str:
        return (
            f"no saved tensor reaches offload_threshold_mb={self._options['offload_threshold_mb']:g}; the largest has "
            f"{format_bytes(self._counters.largest_small_bytes)}"
        )

    def _file_below(self, device: torch.device) -> TierFile | None:
        """Return the file on the disk, of which an offloader has one for all devices; a simulation has its own."""
        open_file = backend_of(device).open_file
        if self._opened_by != open_file:
            self._file, self._opened_by = open_file(self._disk, self._disk_budget_bytes), open_file
        return self._file

    def _state_of(self, device: torch.device) -> DeviceState | None:
        if device not in self._devices:
            copier = self._given_copier
            if isinstance(copier, SyncCopier) and device.type != "cpu":
                raise ValueError(
                    f"copier=SyncCopier() copies memory of the CPU alone, but tensors are on {device}; leave copier out"
                )
            host_bytes = self._host_budget_bytes
            if host_bytes is None:
                host_bytes = default_host_budget(backend_of(device).free_host_bytes())
            lower, clock = memories_below(device, copier, self._pin_memory, host_bytes, self._file_below(device))
            if not lower:
                level = logging.INFO if device.type == "cpu" else logging.WARNING
                logger.log(level, "activation offloading: %s", _NOTHING_TO_MOVE)
            elif device.type == "cpu" and self._file is not None:
                map_large_blocks(self._threshold_bytes)
            self._devices[device] = DeviceState(device, lower, clock, self._lock) if lower else None
        return self._devices[device]


def _with_skip(skip: Skip, **options: Any) -> ActivationOffloader:
    return ActivationOffloader(skip=skip, **options)


def wrap_forward_with_offload(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Make a function that runs `forward` in an `offload_context` of its own, with its name and signature.

    Args:
        forward: a function or a module's bound `forward`; a bound method's module tells which weights must not move.
        options: options of `ActivationOffloader`.
    """
    offloader = ActivationOffloader(**options)
    owner = getattr(forward, "__self__", None)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with offloader.offload_context(owner if isinstance(owner, nn.Module) else None):
            return forward(*args, **kwargs)

    return wrapped


@contextmanager
def _timing(op_tracer: OpTracer) -> Iterator[None]:
    """Time operations without full garbage collections, of which one may take longer than a small step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with op_tracer:
            yield
    finally:
        if was_enabled:
            gc.enable()


def _is_captured() -> bool:
    """Return whether a CUDA graph is being captured: no event may be asked then, and no host memory registered."""
    captured: bool = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
    if captured:
        warning_once(logger, "activation offloading: everything stays on the device while a CUDA graph is captured")
    return captured


def _device_of(model: nn.Module | None, copier: Copier | None) -> torch.device:
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None:
        return parameter.device
    accelerator = torch.accelerator.current_accelerator(check_available=True) if copier is None else None
    return accelerator or torch.device("cpu")


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else round(gib * GIB)
