"""A frozen teacher whose weights live in host memory and visit the device for as long as they are used."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hf_memopt.teacher.sharing import SharedWeights
from hf_memopt.teacher.weights import PackedWeights
from hf_memopt.transfer import Copier, Transfer, copier_for

logger = logging.getLogger(__name__)

TeacherMode = Literal["auto", "resident", "swap"]
TEACHER_MODES: tuple[str, ...] = get_args(TeacherMode)


@dataclass(frozen=True)
class TeacherReport:
    """What a teacher costs. Bytes are totals since it was made.

    Attributes:
        mode: `"resident"` or `"swap"`.
        reason: why, in words.
        home: device that holds the weights between visits.
        device: device that runs the teacher.
        host_bytes: host memory of the master copy.
        device_bytes: the teacher's own bytes on `device` right now.
        shared_bytes: weights read from the student's memory, in no other figure here.
        bytes_host_to_device: copied so far.
        bytes_device_to_host: copied so far; frozen weights are never copied back, so this stays 0.
        stall_ms: time for which compute waited for copies.
    """

    mode: str
    reason: str
    home: str
    device: str
    host_bytes: int
    device_bytes: int
    shared_bytes: int
    bytes_host_to_device: int
    bytes_device_to_host: int
    stall_ms: float


class OffloadedTeacher:
    """Holds a frozen module at home in host memory and brings its weights to the device on demand.

    The weights are packed into one immutable host block, pinned where possible. A visit copies that block to the
    device on a side stream; leaving drops the device copy. Nothing is copied back, cast or synchronised with the host
    in a step, and the allocator's cache is left alone.

    This is no `nn.Module`: an attribute of a student holding it appears in no `parameters()`, `state_dict()`,
    `train()` or `to()` of the student. A deep copy of the student shares it.

    Args:
        module: the teacher. Frozen and put into evaluation mode here, and owned by this object from now on. It stays
            usable on the CPU between visits.
        device: where the teacher runs.
        mode: `"swap"` as described; `"resident"`, the weights stay on `device`; `"auto"`, resident where offloading
            cannot help (the device is the CPU, or the teacher fits `budget_gib`), otherwise swap.
        dtype: cast floating-point parameters to this dtype, once. Buffers keep theirs, since rounding e.g. rotary
            frequencies moves cosines by up to 0.2, and so do modules named in a `_keep_in_fp32_modules` list.
        share_with: the student. Parameters that are frozen there and bitwise equal under the same name are held once.
        budget_gib: for `"auto"`, device memory that the teacher's own weights may keep.
        copier: how bytes move. None: side streams on an accelerator, plain copies on the CPU. `SyncCopier()` with
            `mode="swap"` makes a CPU run every step of an offloaded run.

    Raises:
        ValueError: unknown mode, or weights that cannot be rebound (quantised, sharded, sparse or meta tensors).

    Cost of a visit: one copy of the teacher's own bytes over the link, hidden behind whatever runs between
    `prefetch()` and `onload()`. Ideas after torch's frozen-weight offloading in accelerate (#1711: no copy back).
    """

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
    ) -> None:
        if mode not in TEACHER_MODES:
            raise ValueError(f"teacher mode={mode!r} is unknown; use one of {', '.join(TEACHER_MODES)}")
        self.device = torch.device(device)
        self._module = module
        self._visits = 0
        self._block: Tensor | None = None
        self._transfer: Transfer | None = None
        module.requires_grad_(False)
        module.train(False)
        if dtype is not None:
            _cast_parameters(module, dtype)
        self._copier = copier_for(self.device) if copier is None else copier
        self._shared = SharedWeights(module, share_with)
        self._weights = PackedWeights(module, exclude=self._shared.parameters)
        self._mode, self._reason = self._choose_mode(mode, budget_gib)
        allocate = self._copier.empty_device if self._mode == "resident" else self._copier.empty_host
        # Where the weights are at home. Never written again, so that a visit has nothing to bring back.
        self._master = allocate(self._weights.num_bytes)
        self._home = self._weights.pack(self._master)
        self._weights.bind(self._home)
        logger.info("teacher: %s, %.1f MiB of its own; %s", self._mode, self._weights.num_bytes / 2**20, self._reason)

    @property
    def module(self) -> nn.Module:
        """The teacher, on the host between visits."""
        return self._module

    @contextmanager
    def onload(self) -> Iterator[nn.Module]:
        """The module, ready to be called on `device` for as long as the context lasts.

        May be nested. Whatever happens inside, or in the copy itself, the module is back on the host afterwards.

        Raises:
            RuntimeError: shared weights of the student have been changed (see `SharedWeights.bind`).
        """
        self._visits += 1
        try:
            if self._visits == 1:
                self._arrive()
            yield self._module
        finally:
            self._visits -= 1
            if self._visits == 0 and self._mode == "swap":
                self._leave()

    def prefetch(self) -> None:
        """Start the copy for the next visit, if it is not under way. Takes the teacher's device memory from now on."""
        if self._mode == "swap" and self._block is None:
            block = self._copier.empty_device(self._weights.num_bytes)
            self._transfer = self._copier.to_device(self._master, block)
            self._block = block

    def report(self) -> TeacherReport:
        """Mode and costs so far."""
        resident = self._mode == "resident"
        return TeacherReport(
            mode=self._mode,
            reason=self._reason,
            home=str(self.device) if resident else "cpu",
            device=str(self.device),
            host_bytes=0 if resident else self._master.nbytes,
            device_bytes=_num_bytes(self._master if resident else self._block),
            shared_bytes=self._shared.num_bytes,
            bytes_host_to_device=self._copier.bytes_to_device,
            bytes_device_to_host=self._copier.bytes_to_host,
            stall_ms=self._copier.stall_ms(),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadedTeacher":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("an OffloadedTeacher cannot be pickled: its weights belong to one process; load it again there")

    def _choose_mode(self, mode: TeacherMode, budget_gib: float | None) -> tuple[str, str]:
        own_gib = self._weights.num_bytes / 2**30
        if mode != "auto":
            return mode, f"{mode} was asked for"
        if self.device.type == "cpu":
            return "resident", "it runs on the CPU, where offloading frees nothing"
        if budget_gib is not None and own_gib <= budget_gib:
            return "resident", f"its {own_gib:.2f} GiB fit the budget of {budget_gib:g} GiB"
        return "swap", f"its {own_gib:.2f} GiB leave the device between visits"

    def _arrive(self) -> None:
        self._shared.bind()
        if self._mode == "swap":
            self.prefetch()
            self._finish_copy()
            assert self._block is not None
            self._weights.bind(self._weights.views(self._block))

    def _leave(self) -> None:
        self._weights.bind(self._home)
        # After an exception the copy may still be under way, and then its memory must not be reused yet.
        self._finish_copy()
        if self._block is not None:
            self._copier.release(self._block)
            self._block = None

    def _finish_copy(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None


def _num_bytes(block: Tensor | None) -> int:
    return 0 if block is None else block.nbytes


def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    kept = tuple(name for child in module.modules() for name in getattr(child, "_keep_in_fp32_modules", None) or ())
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)
