"""Tests of training steps for memory that stays behind, by the ages of live storages."""

import gc
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt.memory.leaks.leak_report import Culprit, LeakReport, MemoryLeakError, find_culprits, unreached
from hf_memopt.memory.leaks.live_storages import WITH_GRAPH, live_storages
from hf_memopt.ranges import COUNT, COUNT_OR_ZERO, Range
from hf_memopt.transfer.host_arena import HostArena, HostHoldings

logger = logging.getLogger(__name__)

# Looks before the tested ones, the tested ones, and those after them whose tensors may still be in use.
_WARM_UP, _TESTED, _IN_FLIGHT = 8, 30, 8
_MAX_OVERHEAD = 0.01
# Share of the tested steps that must leave something. By chance, with probability 1/2 in each of 30 steps, that would
# happen with probability 0.003 (one-sided sign test).
_LEAKY_SHARE = 0.75
_COUNTING_DEVICES = ("cuda", "xpu")


class _Birth(NamedTuple):
    """When a storage was first seen. The weak reference also reserves its address: see `_forget_dead`."""

    storage: StorageWeakRef
    step: int
    num_bytes: int
    has_graph: bool


class _Look(NamedTuple):
    step: int
    unreached_bytes: int
    offload: HostHoldings


class StorageAges:
    """Tests whether nearly every one of the last steps left something that is still alive.

    In a sound run, everything alive was made at the start or in the last few steps. Total live bytes would not do: they
    also grow when optimizer state is made late, when a cache fills up, in a longer batch, or in an evaluation.

        steps:  1 … 8 | 9 ………………… 38 | 39 … 46
                start |    tested    | in flight

    Tensors of samples in flight may be in use still, as prefetched batches are. Autograd graphs count at any size.
    Growth of an accelerator's allocator beyond these tensors is a leak too.
    """

    def __init__(self, num_tested: int, num_in_flight: int, min_bytes_per_step: int) -> None:
        self._num_tested = num_tested
        self._min_bytes_per_step = min_bytes_per_step
        self._measure_unreached = allocator_counter()
        self._births: dict[int, _Birth] = {}
        # One more than the samples, as growth is measured between two of them.
        self._looks: deque[_Look] = deque(maxlen=num_tested + num_in_flight + 1)

    def sample(self, step: int) -> None:
        """Look at the tensors alive after `step`, which must grow from call to call. Costs one `live_storages`."""
        held = live_storages()
        self._forget_dead()
        for address, items in held.items():
            if address not in self._births:
                storage = items[0].tensor.untyped_storage()
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._births[address] = _Birth(weak, step, storage.nbytes(), items[0].kind == WITH_GRAPH)
        measure = self._measure_unreached
        unreached_bytes = measure([items[0].tensor for items in held.values()]) if measure else 0
        self._looks.append(_Look(step, unreached_bytes, HostArena.of_process()))

    def is_leaking(self) -> bool:
        graphs = {birth.step for birth in self._births.values() if birth.has_graph}
        return (
            _mostly(rate >= self._min_bytes_per_step for rate in self._held_rates())
            or _mostly(step in graphs for step in self.tested_steps[1:])
            or self.unreached_bytes_per_step() > 0
        )

    @property
    def tested_steps(self) -> list[int]:
        """Return the steps of the tested samples, and before them the step from which the first one counts."""
        return [look.step for look in self._looks][: self._num_tested + 1]

    def unreached_bytes_per_step(self) -> float:
        """Return the growth of the allocator's bytes outside of live storages where it persists, else 0."""
        rates = [
            (after.unreached_bytes - before.unreached_bytes) / (after.step - before.step)
            for before, after in pairwise(self._looks)
        ]
        return median(rates) if _mostly(rate >= self._min_bytes_per_step for rate in rates) else 0.0

    def report(self) -> LeakReport:
        """Return the verdict on the tested steps; to describe the culprits of a leak takes up to seconds."""
        steps, leaking = self.tested_steps, self.is_leaking()
        first, last = self._looks[0], self._looks[-1]
        unreached_per_step = self.unreached_bytes_per_step()
        bytes_per_step = median(self._held_rates()) + unreached_per_step
        culprits: tuple[Culprit, ...] = ()
        freed = 0
        if leaking:
            culprits = find_culprits(self._suspects(), len(steps) - 1)
            if unreached_per_step > 0:
                culprits = (*culprits, unreached(last.unreached_bytes - first.unreached_bytes))
            # After the culprits were described: tensors that only reference cycles hold are gone then.
            before = self._suspect_bytes()
            gc.collect()
            freed = before - self._suspect_bytes()
        taken = last.offload.num_allocations - first.offload.num_allocations
        offload, sees_allocator = HostHoldings(last.offload.num_bytes, taken), self._measure_unreached is not None
        return LeakReport(leaking, bytes_per_step, culprits, steps[0] + 1, steps[-1], freed, sees_allocator, offload)

    def _suspects(self) -> dict[int, int]:
        self._forget_dead()
        tested = set(self.tested_steps[1:])
        return {address: birth.step for address, birth in self._births.items() if birth.step in tested}

    def _suspect_bytes(self) -> int:
        return sum(self._births[address].num_bytes for address in self._suspects())

    def _held_rates(self) -> list[float]:
        self._forget_dead()
        alive: Counter[int] = Counter()
        for birth in self._births.values():
            alive[birth.step] += birth.num_bytes
        return [alive[step] / (step - before) for before, step in pairwise(self.tested_steps)]

    def _forget_dead(self) -> None:
        # The address of a dead storage cannot be reused before its weak reference is gone.
        self._births = {
            address: birth
            for address, birth in self._births.items()
            if not birth.storage.expired()  # type: ignore[no-untyped-call]
        }


def _mostly(verdicts: Iterable[bool]) -> bool:
    verdicts = list(verdicts)
    return sum(verdicts) >= _LEAKY_SHARE * len(verdicts)


def allocator_counter() -> Callable[[list[Tensor]], int] | None:
    """Return the bytes of the accelerator's allocator that are in no tensor, or None without such counters."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return _unreached_bytes if accelerator and accelerator.type in _COUNTING_DEVICES else None


def _unreached_bytes(tensors: list[Tensor]) -> int:
    index = torch.accelerator.current_device_index()
    reached = sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor.device.index == index)
    return torch.accelerator.memory_allocated() - reached


def detect_leaks(step_fn: Callable[[], object], num_steps: int = 60, min_bytes_per_step: int = 1024) -> LeakReport:
    """Run `step_fn` `num_steps` times and say whether memory stays behind, and who holds it.

    Memory leaks if at least three quarters of the steps leave `min_bytes_per_step` or an autograd graph that is still
    alive at the end. The first sixth of the steps is warm-up, tensors made in the last sixth are taken to be in use.
    Works on any device without synchronising it; each step costs a look, as in `LeakMonitor`.

    Args:
        step_fn: one training step, or n of them to find a leak at every n-th. Its result is dropped.
        num_steps: at least 24.
        min_bytes_per_step: less than this counts as none.

    Raises:
        ValueError: `num_steps` is too small.
    """
    Range(at_least=24, whole=True, why=", to tell a leak from a start").check("num_steps", num_steps)
    COUNT_OR_ZERO.check("min_bytes_per_step", min_bytes_per_step)
    margin = num_steps // 6
    # StorageAges keeps the last sample of the warm-up too: the first tested step grows from there.
    ages = StorageAges(num_steps - 2 * margin, margin, min_bytes_per_step)
    for step in range(1, num_steps + 1):
        step_fn()
        ages.sample(step)
    return ages.report()


class LeakMonitor:
    """Watches a training loop for memory that stays behind at every step.

        monitor = LeakMonitor()
        for batch in batches:
            ...
            monitor.step()

    Args:
        every_n_steps: how often to look. None: as often as costs at most 1 % of the time. A look costs 0.1 to 0.2 s of
            host time in a process that has imported transformers, and no device synchronisation.
        min_bytes_per_step: less than this is no leak. Autograd graphs count at any size.
        action: "warn" logs the report, "raise" raises `MemoryLeakError`; either once, then nothing more is done.

    The earliest verdict comes at the 46th look. A tensor kept at every n-th step only, or once per epoch, is found only
    by looking that rarely. Each process watches itself: with "raise", the launcher has to end the others.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(self, every_n_steps: int | None = None, min_bytes_per_step: int = 1024, action: str = "warn") -> None:
        COUNT.check("every_n_steps", every_n_steps)
        COUNT_OR_ZERO.check("min_bytes_per_step", min_bytes_per_step)
        if action not in ("warn", "raise"):
            raise ValueError(f"action={action!r} is unknown; use 'warn' or 'raise'")
        self._found: LeakReport | None = None
        self._every_n_steps = every_n_steps
        self._raises = action == "raise"
        self._ages = StorageAges(_TESTED, _IN_FLIGHT, min_bytes_per_step)
        self._num_steps = self._num_looks = 0
        self._next_look_s = 0.0

    def step(self) -> LeakReport | None:
        """End a step; returns the report when a leak is found, or raises `MemoryLeakError` with `action="raise"`."""
        self._num_steps += 1
        start = time.perf_counter()
        every = self._every_n_steps
        is_due = start >= self._next_look_s if every is None else self._num_steps % every == 0
        if self._found is not None or not is_due:
            return None
        self._ages.sample(self._num_steps)
        self._num_looks += 1
        leaking = self._num_looks >= _WARM_UP + _TESTED + _IN_FLIGHT and self._ages.is_leaking()
        now = time.perf_counter()
        # So that a look costs at most a hundredth of the time in between.
        self._next_look_s = now + (now - start) / _MAX_OVERHEAD
        if not leaking:
            return None
        self._found = self._ages.report()
        if self._raises:
            raise MemoryLeakError(self._found)
        logger.warning("%s", self._found)
        return self._found

    def report(self) -> LeakReport | None:
        """Return the report, or None while there is no verdict."""
        return self._found
