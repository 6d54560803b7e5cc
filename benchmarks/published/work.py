"""The work of published steps, recorded once, so that their times can be computed for any speeds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.cards import card_of
from benchmarks.published.measurements import Measurement
from benchmarks.published.steps import simulated
from hf_memopt.autograd_state import in_backward
from hf_memopt.planning import estimate
from hf_memopt.planning.accounting.operation import Operation, device_kind
from hf_memopt.planning.cards.gpus import BACKWARD_SHARE, VIEW_SHARE, Card, KernelSpeeds
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.planning.simulation.virtual_time import (
    ATTENTION,
    CONVOLUTION,
    MEMORY,
    VirtualClock,
    flops_per_s,
    starts_kernel,
    work_of,
)

Array = NDArray[np.float64]
PARTS = KernelSpeeds._fields


@dataclass(frozen=True)
class RecordedWork:
    """The operations of a step, one row for each.

    Columns are the index in `PARTS`, seconds of arithmetic and seconds of memory traffic by the data sheet, whether the
    operation starts a kernel, and whether it is in backward.
    """

    longer: Array  # of the whole model, or of one with a few of its equal layers
    shorter: Array  # with one group of layers less; empty if the whole model was simulated
    num_more: int  # further groups in the whole model


def recorded(measured: Measurement, folder: Path) -> RecordedWork:
    path = folder / ("".join(letter if letter.isalnum() else "_" for letter in measured.name) + ".npz")
    if not path.exists():
        work = run_isolated(lambda: _record(measured))
        np.savez_compressed(path, longer=work.longer, shorter=work.shorter, num_more=work.num_more)
    with np.load(path, allow_pickle=False) as file:
        return RecordedWork(file["longer"], file["shorter"], int(file["num_more"]))


def step_s(work: RecordedWork, speeds: KernelSpeeds, kernel_s: float, host_s: float) -> float:
    """Return the seconds of a step by the rules of `VirtualClock`."""
    longer = _run_s(work.longer, speeds, kernel_s, host_s)
    if not work.num_more:
        return longer
    return longer + work.num_more * (longer - _run_s(work.shorter, speeds, kernel_s, host_s))


def _run_s(operations: Array, speeds: KernelSpeeds, kernel_s: float, host_s: float) -> float:
    part, compute_s, memory_s, is_kernel, is_backward = operations.T
    shares = np.array(speeds)[part.astype(int)]
    takes_s = np.where(is_kernel > 0, kernel_s + np.maximum(compute_s / shares, memory_s / speeds.memory), 0.0)
    host = host_s * np.where(is_kernel > 0, 1.0, VIEW_SHARE) * np.where(is_backward > 0, BACKWARD_SHARE, 1.0)
    # An operation that waits for the host delays itself and all later ones.
    computed_s, started_s = np.cumsum(takes_s), np.cumsum(host)
    waits_s = (started_s - (computed_s - takes_s))[is_kernel > 0]
    return float(computed_s[-1] + max(0.0, waits_s.max()))


class _RecordingClock(VirtualClock):
    def __init__(self, card: Card, like: str, host_bytes_per_s: float) -> None:
        super().__init__(card, like, host_bytes_per_s)
        self.operations: list[tuple[float, ...]] = []

    def begin_step(self) -> None:
        super().begin_step()
        self.operations = []

    def charge(self, operation: Operation, phase: str) -> None:
        super().charge(operation, phase)
        if {device_kind(leaf) for leaf in (*operation.inputs, *operation.outputs)} <= {"cpu"}:
            return
        is_kernel, part, compute_s, memory_s = starts_kernel(operation.function), MEMORY, 0.0, 0.0
        if is_kernel:
            work = work_of(operation, self.card)
            if work.flops:
                part = work.kind if work.kind in (CONVOLUTION, ATTENTION) else work.precision
            compute_s = work.flops / flops_per_s(work, self.card)
            memory_s = work.num_bytes / self.card.memory_bytes_per_s
        self.operations.append((PARTS.index(part), compute_s, memory_s, is_kernel, in_backward()))


def _record(measured: Measurement) -> RecordedWork:
    step = simulated(measured)
    clocks = []

    def clock(*given: Any) -> _RecordingClock:
        clocks.append(_RecordingClock(*given))
        return clocks[-1]

    with patch.object(estimate, "VirtualClock", clock):
        estimate.simulate_step(step, gpu=card_of(measured.gpu))
    runs = [np.array(each.operations, dtype=float) for each in clocks]
    if step.repeated is None or len(runs) != 2:
        return RecordedWork(runs[-1], runs[-1][:0], 0)
    layers = step.repeated.layers
    few = layers.num_few * layers.period + layers.count % layers.period
    return RecordedWork(runs[1], runs[0], (layers.count - few) // layers.period - 1)
