"""Runs a program plainly and offloaded, and compares them bit by bit, unless the program proves nothing.

Plain torch itself may read bytes that were overwritten unseen by autograd, and have other gradients than with saved
copies. Or forward overwrites, unseen by autograd, saved bytes that backward never reads: no hook can tell whether a
tensor that is saved later has the same bytes.
"""

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import hypothesis
import torch
from adversarial_copier import AdversarialCopier
from program_operations import OPERATIONS, last_uses
from program_strategy import Program
from random_plans import RandomPlanner
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_memopt import ActivationOffloader
from hf_memopt.activations import plan_maker
from hf_memopt.activations.planner import offload_plan, search
from hf_memopt.transfer import lower_memory, memories_below
from hf_memopt.transfer.clock import HostClock

Around = Callable[["Run"], AbstractContextManager[object]]


class SlicingCopier(AdversarialCopier):
    """A copier whose device memory is a slice of larger memory, as from an allocator of its own."""

    def empty_device(self, num_bytes: int) -> Tensor:
        self.tick()
        self.live_bytes += num_bytes
        buffer = self._poisoned(num_bytes + 128)[64 : 64 + num_bytes]
        self._on_device.add(buffer.data_ptr())
        return buffer


COPIERS: dict[str, Callable[[int], AdversarialCopier]] = {
    "early": lambda seed: AdversarialCopier("early"),
    "late": lambda seed: AdversarialCopier("late"),
    "random": lambda seed: AdversarialCopier("random", seed),
    "slices": lambda seed: SlicingCopier("random", seed),
}


class Run:
    """One run of a program, which `error` ended in pass `where`.

    Args:
        program: program to run.
        around: constructor of a pass's context.
        after_line: function that gets the name of each operation of a pass, and "" before the first operation.
    """

    def __init__(self, program: Program, around: Around, after_line: Callable[[str], None] = lambda name: None) -> None:
        self.seen: list[Tensor | None] = []
        self.error: tuple[str, str] | None = None
        self.where = 0
        self.steps_between = False
        self._after_line = after_line
        self.model = nn.ParameterDict()
        self._program, self._around = program, around
        self._left_over: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(0)
        try:
            for self.where, each in enumerate(program.passes):
                self._pass(each)
        except Exception as error:
            self.error = type(error).__name__, str(error)
        self._left_over.clear()

    def parameter(self, key: tuple[Any, ...], size: tuple[int, ...]) -> Tensor:
        name = " ".join(map(str, key)).replace(".", "_")
        if name not in self.model:
            values = torch.randn(size, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=key[-1])
            self.model[name] = nn.Parameter(values / size[-1] ** 0.5 if len(size) > 1 else values)
        parameter: Tensor = self.model[name]
        return parameter

    def linear(self, width: int, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        weight = self.parameter(("weight", width, number, dtype), (width, width))
        return weight, self.parameter(("bias", width, number, dtype), (width,))

    def backward(self, x: Tensor, retain_graph: bool = False) -> None:
        self._note(loss := x.mean())
        loss.backward(retain_graph=retain_graph)

    def _pass(self, each: Any) -> None:
        self._make_parameters()
        with self._around(self):
            loss = self._forward(each)
            if each.backward == "inside":
                loss.backward()
        if each.backward == "next":
            self._left_over.append(loss)
        elif each.backward in ("after", "twice"):
            loss = sum(self._left_over, loss)
            self._left_over.clear()
            loss.backward(retain_graph=each.backward == "twice")
            if each.backward == "twice":
                loss.backward()
        for parameter in self.model.values():
            self._note(parameter.grad)
            if each.steps and parameter.grad is not None:
                self.steps_between |= bool(self._left_over)
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
            parameter.grad = None

    def _forward(self, each: Any) -> Tensor:
        body = self._program.bodies[each.body]
        values = {"x": torch.randn(each.rows, 16, generator=self._generator)}
        self._after_line("")
        for line, dying in zip(body.lines, last_uses(body.lines, body.losses), strict=True):
            operation = OPERATIONS[line.operation]
            result = operation.function(self, *(values[name] for name in line.operands), *line.options)
            if line.target:
                values[line.target] = result
            del result
            for name in dying if self._program.frees else ():
                del values[name]
            self._after_line(line.operation)
        loss = sum(values[name].double().mean() for name in body.losses)
        assert isinstance(loss, Tensor)
        self._note(loss)
        return loss

    def _make_parameters(self) -> None:
        """Make all parameters before the first context, which needs the whole model."""
        for width, dtype in itertools.product((4, 8, 16, 32), (torch.float32, torch.float64)):
            for number in (0, 1):
                self.linear(width, number, dtype)
            self.parameter(("scale", width, dtype), (width,))

    def _note(self, tensor: Tensor | None) -> None:
        self.seen.append(None if tensor is None else tensor.detach().clone())


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.detach().as_strided((reach,), (1,), tensor.storage_offset()).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), 0)


def _can_be_copied(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.numel() > 0 and not tensor._is_zerotensor()


class _Copy:
    """A saved tensor and a copy for backward."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._copy = tensor.detach(), _copy(tensor)
        self._seen = self._tensor._version, self._copy

    def look(self) -> bool:
        """Return whether the tensor has changed since the last look without being counted as modified."""
        (version, bytes_), self._seen = self._seen, (self._tensor._version, self._tensor.clone())
        return version == self._seen[0] and not torch.equal(bytes_, self._seen[1])

    def copy(self) -> Tensor:
        return _copy(self._copy)


class _Copies:
    """Hooks that save copies of tensors, and note unseen changes by lines of a forward without a backward in it."""

    def __init__(self) -> None:
        self.are_overwritten = False
        self._alive: weakref.WeakSet[_Copy] = weakref.WeakSet()

    def hooks(self, run: Run) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda saved: saved.copy() if isinstance(saved, _Copy) else saved)

    def look(self, operation: str) -> None:
        have_changed = [copy.look() for copy in list(self._alive)]
        runs_backward = operation in ("", "grad") or operation.startswith("backward")
        self.are_overwritten |= any(have_changed) and not runs_backward

    def _pack(self, tensor: Tensor) -> Any:
        if not _can_be_copied(tensor) or (tensor.is_leaf and tensor.requires_grad):
            return tensor
        copy = _Copy(tensor)
        self._alive.add(copy)
        return copy


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


def plain(program: Program) -> Run:
    """Return the plain run of a program, and reject a program that proves nothing."""
    run = Run(program, lambda run: nullcontext())
    finite = all(bool(tensor.isfinite().all()) for tensor in run.seen if tensor is not None)
    hypothesis.assume(finite)
    copies = _Copies()
    copied = Run(program, copies.hooks, copies.look)
    hypothesis.assume(not copies.are_overwritten)
    # After an error of plain torch, the passes before it are still compared.
    hypothesis.assume(all(map(_same, run.seen, copied.seen)))
    hypothesis.assume(run.error is not None or copied.error is None)
    return run


class CountingClock(HostClock):
    """A clock with 0.1 ms between marks, so that plans do not depend on the machine."""

    def __init__(self) -> None:
        self._now = 0

    def mark(self) -> float:
        self._now += 1
        return 1e-4 * self._now

    def reached(self, mark: float) -> bool:
        return True

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


@contextmanager
def repeatable() -> Iterator[None]:
    """Make plans the same in each run, with a shorter search."""
    with (
        patch.object(memories_below, "clock_for", lambda device: CountingClock()),
        patch.object(lower_memory, "measure_link", lambda *_: (1e7, 1e7)),
        patch.object(search, "_MAX_EVENTS", 500),
        patch.object(search, "_MIN_PLANS", 20),
        patch.object(offload_plan, "_MAX_EVENTS", 500),
        patch.object(offload_plan, "_MIN_PLANS", 10),
    ):
        yield


MODES = ("all", "inputs", "auto", "plan by lot", "another plan by lot")


def offloaded(program: Program, mode: str) -> list[str]:
    """Return the errors of an offloaded run."""
    lots = RandomPlanner(random.Random(f"{mode} {program.seed}"))
    want = _EXPECTED[0]
    name = mode if mode in ("all", "inputs") else "auto"
    options: dict[str, Any] = {"mode": name, "offload_threshold_mb": 0, "copier": COPIERS[program.copier](program.seed)}
    if "lot" in mode:
        options["budget_gib"] = 1024.0  # without a budget, one more pass would go without a plan
    offloader = ActivationOffloader(**options, max_slowdown=100.0)
    with patch.object(plan_maker, "make_plan", lots) if "lot" in mode else nullcontext():
        run = Run(program, lambda run: offloader.offload_context(run.model if program.is_known else None))
    return [*_differences(run, want), *_left_behind(offloader)]


# The plain run of the program under test, which all modes share.
_EXPECTED: list[Run] = []


def _differences(run: Run, want: Run) -> Iterator[str]:
    for got, expected in zip(run.seen, want.seen, strict=False):
        if not _same(got, expected):
            yield "another loss or gradient than plain"
            return
    if run.error and "modified by an inplace operation" in run.error[1] and run.steps_between:
        return  # no run recomputes from changed parameters; plain torch is right if autograd has not saved them
    if (run.error is None) != (want.error is None):
        yield f"pass {run.where}: {run.error}; plain in pass {want.where}: {want.error}"
    elif run.error and want.error:
        same = run.error[0] == want.error[0] and _is_of_writing(run.error[1]) == _is_of_writing(want.error[1])
        if not same or run.where != want.where:
            yield f"pass {run.where}: {run.error}; plain in pass {want.where}: {want.error}"
    elif len(run.seen) != len(want.seen):
        yield "more or fewer losses than plain"


def _is_of_writing(message: str) -> bool:
    """Return whether a message is autograd's refusal of a write to a saved tensor or to a custom function's result."""
    return "modified by an inplace operation" in message or "is a view and its base" in message


def _left_behind(offloader: ActivationOffloader) -> Iterator[str]:
    if offloader.stats.host_bytes_live:
        gc.collect()
    if offloader.stats.host_bytes_live:
        yield f"{offloader.stats.host_bytes_live} bytes of host memory are held when no graph is alive"


def check(program: Program, modes: Sequence[str] = MODES) -> None:
    """Raise an AssertionError with the mode and the difference if a mode differs from the plain run."""
    torch.manual_seed(0)
    _EXPECTED[:] = [plain(program)]
    with repeatable():
        for mode in modes:
            faults = offloaded(program, mode)
            assert not faults, f"{mode}: {'; '.join(faults)}"
