"""Tests of training steps for memory that stays behind."""

import gc
import logging
import time
from collections.abc import Callable

from hf_memopt.memory.leaks.leak_report import Culprit, LeakReport, MemoryLeakError, find_culprits, unreached
from hf_memopt.memory.leaks.storage_ages import StorageAges, allocator_counter
from hf_memopt.ranges import COUNT, COUNT_OR_ZERO, Range

logger = logging.getLogger(__name__)

# Looks before the tested ones, the tested ones, and those after them whose tensors may still be in use.
_WARM_UP, _TESTED, _IN_FLIGHT = 8, 30, 8
_MAX_OVERHEAD = 0.01


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
    ages = StorageAges(num_steps - 2 * margin, margin, min_bytes_per_step, allocator_counter())
    for step in range(1, num_steps + 1):
        step_fn()
        ages.sample(step)
    return _report(ages)


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
        self._ages = StorageAges(_TESTED, _IN_FLIGHT, min_bytes_per_step, allocator_counter())
        self._num_steps = self._num_looks = 0
        self._next_look_s = 0.0

    def step(self) -> LeakReport | None:
        """End a step; returns the report when a leak is found, or raises `MemoryLeakError` with `action="raise"`."""
        self._num_steps += 1
        if self._found is not None or not self._is_due():
            return None
        start = time.perf_counter()
        self._ages.sample(self._num_steps)
        self._num_looks += 1
        leaking = self._num_looks >= _WARM_UP + _TESTED + _IN_FLIGHT and self._ages.is_leaking()
        now = time.perf_counter()
        # So that a look costs at most a hundredth of the time in between.
        self._next_look_s = now + (now - start) / _MAX_OVERHEAD
        if not leaking:
            return None
        self._found = _report(self._ages)
        if self._raises:
            raise MemoryLeakError(self._found)
        logger.warning("%s", self._found)
        return self._found

    def report(self) -> LeakReport | None:
        """Return the report; None while there is no verdict."""
        return self._found

    def _is_due(self) -> bool:
        if self._every_n_steps is None:
            return time.perf_counter() >= self._next_look_s
        return self._num_steps % self._every_n_steps == 0


def _report(ages: StorageAges) -> LeakReport:
    steps = ages.tested_steps
    leaking = ages.is_leaking()
    bytes_per_step = ages.held_bytes_per_step() + ages.unreached_bytes_per_step()
    culprits: tuple[Culprit, ...] = ()
    freed = 0
    if leaking:
        culprits = find_culprits(ages.suspects(), len(steps) - 1)
        if ages.unreached_bytes_per_step() > 0:
            culprits = (*culprits, unreached(ages.unreached_growth_bytes()))
        # After the culprits were described: tensors that only reference cycles hold are gone then.
        before = ages.suspect_bytes()
        gc.collect()
        freed = before - ages.suspect_bytes()
    return LeakReport(
        leaking, bytes_per_step, culprits, steps[0] + 1, steps[-1], freed, ages.counts_allocator, ages.offload()
    )
