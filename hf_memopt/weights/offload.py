"""Frozen teachers whose weights live in host memory or in files, and visit the device while they are used."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.autograd_state import ViewMeta, bytes_of
from hf_memopt.memory.device_counters import counters_for
from hf_memopt.ranges import NOT_NEGATIVE
from hf_memopt.transfer import Copier, clock_for, copier_for
from hf_memopt.transfer.host_memory import return_freed_memory
from hf_memopt.transfer.scratch_file import check_disk
from hf_memopt.units import GIB
from hf_memopt.weights.homes.home import HOMES, Home, WeightsHome, make_home
from hf_memopt.weights.homes.packed_weights import PackedWeights, claim_device, inner_tensors, is_quantised
from hf_memopt.weights.residency.away import Classes, set_plain
from hf_memopt.weights.residency.selection import why_they_stay
from hf_memopt.weights.sharing import SharedWeights
from hf_memopt.weights.strategies.auto import TEACHER_MODES, AutoWeights, TeacherMode, choose_at_start
from hf_memopt.weights.strategies.placement import (
    REMEDY_OF_WRITES,
    ResidentWeights,
    SharedBase,
    StreamedVisits,
    SwappedWeights,
    WeightPlacement,
    WriteGuard,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TeacherReport:
    """The cost of a teacher; prints as text. Bytes and times are totals since it was made, unless said otherwise.

    Attributes:
        mode: `"resident"`, `"swap"`, `"stream"`, or `"shared"` for a student's own base.
        reason: for the mode, in words.
        home: device that holds the weights between visits, or `"file"`.
        device: device that runs the teacher.
        host_bytes: host memory of the master copy, which all ranks of a machine share; with files, of the memory that
            reads pass through.
        device_bytes: the teacher's own bytes on `device` now.
        peak_device_bytes: their peak in this mode.
        shared_bytes: weights read from the student's memory, in no other figure here.
        bytes_host_to_device: copied so far.
        bytes_device_to_host: 0: frozen weights are never copied back.
        stall_ms: time for which compute waited for copies, and the host for reads of files.
        stall_ms_per_visit: the same per visit, in the mode that `"auto"` chose; None before a visit in it.
        predicted_device_bytes: `peak_device_bytes` as `"auto"` or the plan of `"stream"` expects it; None before.
        predicted_stall_ms: `stall_ms_per_visit` as `"auto"` expects it; None where it did not choose.
        file_bytes: weights that live in files.
        bytes_read: from files so far, without those that are mapped (rows of embeddings, for one).
    """

    mode: str
    reason: str
    home: str
    device: str
    host_bytes: int
    device_bytes: int
    peak_device_bytes: int
    shared_bytes: int
    bytes_host_to_device: int
    bytes_device_to_host: int
    stall_ms: float
    stall_ms_per_visit: float | None = None
    predicted_device_bytes: int | None = None
    predicted_stall_ms: float | None = None
    file_bytes: int = 0
    bytes_read: int = 0

    @property
    def own_bytes(self) -> int:
        """The teacher's own weights, wherever they live."""
        return self.file_bytes or self.host_bytes or self.device_bytes

    def __str__(self) -> str:
        def mib(num_bytes: int) -> str:
            return f"{num_bytes / 2**20:.1f} MiB"

        lines = [
            f"teacher: {self.mode} on {self.device}, between visits on {self.home}; {self.reason}",
            f"  on {self.device}: {mib(self.device_bytes)} now, {mib(self.peak_device_bytes)} at most; in host memory: "
            f"{mib(self.host_bytes)}; shared with the student: {mib(self.shared_bytes)}",
            f"  copied: {mib(self.bytes_host_to_device)} to {self.device}, {mib(self.bytes_device_to_host)} back; "
            f"compute waited {self.stall_ms:.1f} ms",
        ]
        if self.file_bytes:
            lines.append(f"  in files: {mib(self.file_bytes)}; read from there: {mib(self.bytes_read)}")
        if self.predicted_device_bytes is not None:
            lines.append(f"  predicted: at most {mib(self.predicted_device_bytes)} on {self.device}")
        if self.predicted_stall_ms is not None:
            lines[-1] += f", {self.predicted_stall_ms:.1f} ms of waiting per visit"
        return "\n".join(lines)


class OffloadedTeacher:
    """Holds a frozen module in host memory or in files, and brings its weights to the device on demand.

    The weights are one immutable host block, pinned where possible, and shared by the ranks of a machine. A visit
    copies from it on a side stream; leaving drops the copy. A step copies nothing back, casts nothing, does not wait on
    the host, and leaves the allocator's cache alone.

    With `home="file"` no such block exists: weights are read from the safetensors files that hold them, past the page
    cache, and those that no file holds byte for byte (cast, joined, quantised or made in memory) from a file without a
    name that is written once. The host waits for reads that are not over. A file that was changed raises a DiskError at
    the next visit, or at the end of the present one.

    This is no `nn.Module`, so it is absent from `parameters()`, `state_dict()`, `train()` and `to()` of a student that
    holds it. A deep copy of the student shares it.

    Args:
        module: the teacher, frozen and put into evaluation mode here, and owned by this object from now on. Usable on
            the CPU between visits, unless quantised. If it is the student itself, a PEFT model also given as
            `share_with`, the teacher is its base, with adapters disabled (see `SharedBase`).
        device: where the teacher runs.
        mode: `"swap"`, the weights visit the device in one block; `"stream"`, they pass through a small ring of blocks
            as they are used (see `StreamedVisits`); `"resident"`, they stay on `device`; `"auto"`, resident on the
            CPU, and on an accelerator the mode that `budget_gib` or, without one, the first two optimizer steps allow
            (see `choose`). On the CPU with `home="file"`: streamed, unless `budget_gib` has room for all weights.
        dtype: cast floating-point parameters to it, once. Buffers keep theirs, since rounding e.g. rotary frequencies
            moves cosines by up to 0.2, and so do modules named in a `_keep_in_fp32_modules` list.
        share_with: the student. Parameters that are frozen there and bitwise equal under the same name are held once.
        budget_gib: device memory for the teacher's own weights, for `"auto"` and `"stream"`, which exceeds it where a
            module and the next one need more.
        copier: how bytes move. None: side streams on an accelerator, plain copies on the CPU. `SyncCopier()` with a
            mode other than auto makes a CPU run every step of an offloaded run.
        home: `"host"`, one copy of the weights in host memory; `"file"`, none: see above.
        files: safetensors files, or folders of them, where weights may lie, for `home="file"`. None: those that the
            loader has mapped (transformers does, on Linux, where it casts nothing).
        disk: folder on a local disk for the weights that no such file holds. None: the system's folder for temporary
            files (`TMPDIR`).

    Raises:
        DiskError: a file of the weights cannot be read or written.
        ValueError: unknown mode or home; negative budget; weights that cannot be rebound (sharded, sparse or meta
            tensors, other quantisation than torchao's); a shared base that would not be the teacher; ranks that were
            given different weights; a device that cannot stream.

    With several ranks (torch.distributed is initialised), every rank makes its teacher, in the same order: see `share`.
    Cost of a visit: at most one copy of the teacher's own bytes, streamed ones as often as they pass. Ideas after
    accelerate's offloading of frozen weights (its pull request 1711: no copy back).
    """

    # Of weights that move.
    _writes: WriteGuard | None = None
    # The name of one that was written in a visit.
    _lost_write: str | None = None

    @torch.inference_mode(False)  # autograd may save weights in later visits
    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device | str,
        mode: TeacherMode = "auto",
        dtype: torch.dtype | None = None,
        share_with: nn.Module | None = None,
        budget_gib: float | None = None,
        copier: Copier | None = None,
        home: Home = "host",
        files: Iterable[str | os.PathLike[str]] | None = None,
        disk: str | os.PathLike[str] | None = None,
    ) -> None:
        if mode not in TEACHER_MODES:
            raise ValueError(f"teacher mode={mode!r} is unknown; use one of {', '.join(TEACHER_MODES)}")
        if home not in HOMES:
            raise ValueError(f"teacher home={home!r} is unknown; use one of {', '.join(HOMES)}")
        if home != "file" and (files is not None or disk is not None):
            raise ValueError(
                f"home={home!r}: files={files!r} and disk={disk!r} are for home='file' alone; leave them out"
            )
        check_disk(disk)
        NOT_NEGATIVE.check("budget_gib", budget_gib)
        self.device = torch.device(device)
        self._module = module
        self._visits = 0
        self._lock = threading.RLock()
        self._staying_bytes = 0
        self._home = "file" if home == "file" else "cpu"
        self._at_home: WeightsHome | None = None
        self._copier = copier_for(self.device, purpose="teacher") if copier is None else copier
        if share_with is not None and any(module is part for part in share_with.modules()):
            self._shared = SharedWeights(module, None)
            if mode != "auto" or dtype is not None or home != "host":
                raise ValueError(
                    f"mode={mode!r}, dtype={dtype}, home={home!r}: a teacher that is the student's own base stays "
                    "where the student is, in its dtype; use mode='auto' and no dtype, and leave home out"
                )
            self._placement: WeightPlacement = SharedBase(share_with)
        else:
            module.requires_grad_(False)
            module.train(False)
            if dtype is not None:
                _cast_parameters(module, dtype)
            claim_device(module, self._copier)
            self._shared = SharedWeights(module, share_with)
            buffers = [inner for name, each in module.named_buffers() for inner in inner_tensors(name, each)]
            staying = [*buffers, *why_they_stay(module)]
            self._weights = PackedWeights(module, exclude=[*self._shared.parameters, *module.buffers(), *staying])
            self._staying_bytes = _move(
                [each for each in staying if each.device.type != self.device.type], self._copier
            )
            make = partial(make_home, self._weights, home, self.device, self._copier, files, disk)
            budget_bytes = None if budget_gib is None else int(budget_gib * GIB)
            self._placement = self._place(mode, budget_bytes, home, make)
            if self._writes is not None:
                self._writes.note()
            self._weights.drop_sources()
            return_freed_memory()
        logger.info("teacher: %s; %s", self._placement.mode, self._placement.reason)

    @property
    def module(self) -> nn.Module:
        """The teacher, on the host between visits."""
        return self._module

    @contextmanager
    def onload(self) -> Iterator[nn.Module]:
        """Yield the module, callable on `device` while the context lasts.

        May be nested. The module is back on the host afterwards, also after an error inside or in the copy.

        Raises:
            RuntimeError: shared weights of the student have been changed (see `SharedWeights.bind`); weights were
                written in a visit, or between two with `home="file"`. Nothing keeps that, but in mode resident.
        """
        finished = False
        try:
            with self._lock:
                self._visits += 1
                if self._visits == 1:
                    self._shared.bind()
                    self._refuse_lost_write()
                    with torch.inference_mode(False):  # in which writes are not counted
                        if self._writes is not None:
                            self._writes.keep_writes()
                            self._writes.forget()
                        self._placement.onload()
                    if self._placement.mode == "resident":
                        self._writes = None
                    if self._writes is not None:
                        self._writes.note()
            yield self._module
            finished = True
        finally:
            with self._lock:
                self._visits -= 1
                if self._visits == 0:
                    if self._writes is not None:
                        self._lost_write = self._writes.written()
                        self._writes.forget()
                    self._placement.evict(finished)
                    if self._writes is not None:
                        self._writes.note()
                    if finished:
                        self._refuse_lost_write()

    def prefetch(self) -> None:
        """Start the copy for the next visit, if it is not under way. Takes the teacher's device memory from now on."""
        with self._lock, torch.inference_mode(False):
            self._placement.prefetch()

    def report(self) -> TeacherReport:
        """Return mode and costs so far."""
        placement = self._placement
        device_bytes, peak_device_bytes = placement.device_memory()
        return TeacherReport(
            mode=placement.mode,
            reason=placement.reason,
            home=self._home if placement.host_bytes else str(self.device),
            device=str(self.device),
            host_bytes=placement.host_bytes,
            device_bytes=device_bytes + self._staying_bytes,
            peak_device_bytes=peak_device_bytes + self._staying_bytes,
            shared_bytes=self._shared.num_bytes + placement.shared_bytes,
            bytes_host_to_device=self._copier.bytes_to_device,
            bytes_device_to_host=self._copier.bytes_to_host,
            stall_ms=_stall_ms(self._copier, self._at_home),
            file_bytes=self._at_home.file_bytes if self._at_home and placement.host_bytes else 0,
            bytes_read=self._at_home.bytes_read if self._at_home else 0,
            **placement.predictions(),  # type: ignore[arg-type]
        )

    def _refuse_lost_write(self) -> None:
        name, self._lost_write = self._lost_write, None
        if name is not None:
            raise RuntimeError(f"teacher weight {name!r} was written in a visit; {REMEDY_OF_WRITES}")

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadedTeacher":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("an OffloadedTeacher cannot be pickled: its weights belong to one process; load it again there")

    def _place(
        self, mode: TeacherMode, budget_bytes: int | None, home: Home, make: Callable[[], WeightsHome]
    ) -> WeightPlacement:
        weights, copier = self._weights, self._copier
        first, reason = choose_at_start(
            mode, weights.num_bytes, budget_bytes, self.device.type, home, lambda: counters_for(self.device) is not None
        )
        if first == "resident":
            block = copier.empty_device(weights.num_bytes)
            weights.pack(block)
            return ResidentWeights(weights, block, reason)
        place = make()
        self._writes = WriteGuard(self._module, weights, place, self._shared.parameters)
        if home == "file":  # a home in host memory is given back where the weights become resident
            self._at_home = place
        if first == "swap":
            return SwappedWeights(weights, place, copier, reason)
        budget_bytes = 0 if first == "auto" else budget_bytes
        streamed = StreamedVisits(self._module, weights, place, copier, budget_bytes, reason)
        if first == "stream":
            return streamed
        counters = counters_for(self.device)
        assert counters is not None
        stall_ms = partial(_stall_ms, copier, self._at_home)
        return AutoWeights(streamed, weights, place, copier, stall_ms, counters, clock_for(self.device))


def _stall_ms(copier: Copier, home: WeightsHome | None) -> float:
    return copier.stall_ms() + (0.0 if home is None else 1e3 * home.waited_s)


def _move(tensors: list[Tensor], copier: Copier) -> int:
    """Move tensors to the device, memory that they share once; returns the bytes."""
    moved: dict[int, Tensor] = {}
    for tensor in tensors:
        memory = bytes_of(tensor)
        key = memory.untyped_storage()._cdata
        if key not in moved:
            moved[key] = copier.empty_device(memory.nbytes).copy_(memory)
        tensor.data = ViewMeta(tensor).of(moved[key])
    return sum(each.nbytes for each in moved.values())


def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    kept = tuple(name for child in module.modules() for name in getattr(child, "_keep_in_fp32_modules", None) or ())
    for name, parameter in module.named_parameters():
        if is_quantised(parameter):
            raise ValueError(
                f"dtype={dtype} cannot cast the quantised teacher weight {name!r}; cast the teacher, then quantise it"
            )
        if parameter.is_floating_point() and not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)


class VisitsByCall:
    """Makes each call of a teacher's module a visit (`OffloadedTeacher.onload`), so that a loop needs no change.

    The module's `forward` is replaced on the instance. Hooks around it would not do: torch goes through the module's
    hooks when a call fails, while the end of a visit removes some. Code that reads weights or runs a part of the module
    between calls finds them on the host.

    Args:
        teacher: whose module is called.
    """

    def __init__(self, teacher: OffloadedTeacher) -> None:
        self.teacher = teacher
        self._replaced = vars(teacher.module).get("forward")
        self._forward = teacher.module.forward
        teacher.module.forward = self._visit

    def remove(self) -> None:
        """Restore `forward` and the parameters' class. The module is on the host, and stays frozen."""
        module = self.teacher.module
        set_plain(map(Classes.of, module.parameters()))
        del module.forward
        if self._replaced is not None:
            module.forward = self._replaced

    def _visit(self, *args: Any, **kwargs: Any) -> Any:
        with self.teacher.onload():
            return self._forward(*args, **kwargs)
