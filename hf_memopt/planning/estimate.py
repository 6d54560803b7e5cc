"""Peak memory of a training step, without the accelerator that it is for."""

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_memopt.planning.accounting import caching_allocator, categories
from hf_memopt.planning.accounting.allocation_log import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    AllocationHistory,
    AllocationLog,
    StepPhases,
    StorageRecord,
)
from hf_memopt.planning.accounting.categories import StepLabels, StreamedEstimate
from hf_memopt.planning.accounting.operation import KernelMemory, Operation, device_kind
from hf_memopt.planning.accounting.repeated_layers import NotRepeatedError, add_groups, growth
from hf_memopt.planning.cards.gpus import DEFAULT_CARD, Card, find_card, time_range
from hf_memopt.planning.cards.memory_below import MemoryBelow
from hf_memopt.planning.estimate_report import LargeTensor, MemoryEstimate
from hf_memopt.planning.simulated_step import RepeatedLayers, SimulatedStep
from hf_memopt.planning.simulation import DEVICE_TYPE
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.planning.simulation.device import simulation
from hf_memopt.planning.simulation.ranks.first_rank import first_of
from hf_memopt.planning.simulation.virtual_base import VirtualBase
from hf_memopt.planning.simulation.virtual_disk import VirtualDisk
from hf_memopt.planning.simulation.virtual_time import VirtualClock
from hf_memopt.ranges import COUNT
from hf_memopt.transfer.memories_below import default_host_budget, host_bytes_beside_staging

Like = Literal["cuda", "cpu"]

logger = logging.getLogger(__name__)

_NUM_TOP = 10


@dataclass(frozen=True)
class _Run:
    history: AllocationHistory
    guesses: Counter[str]
    unreached: tuple[str, ...]
    phases_ms: dict[str, float]
    stalls_ms: dict[str, float]
    disk_bytes: int = 0
    written: Mapping[str, int] = field(default_factory=dict)
    streamed: StreamedEstimate | None = None


def estimate_peak_memory(
    setup: Callable[[Any], Any],
    step: Callable[[Any], Any],
    *,
    like: Like = "cuda",
    num_steps: int = 2,
    gpu: str | Card | None = None,
    num_gpus: int = 1,
) -> MemoryEstimate:
    """Run whole training steps on tensors without memory and report the most that was alive at one time.

    Args:
        setup: called with a device, builds model, optimizer and batch there. Its result is passed to `step`.
        step: one training step, up to and including `optimizer.step()` and `zero_grad()`.
        like: whose autocast, attention and allocation rules; "cpu" is for comparisons with real runs on a CPU.
        num_steps: optimizers make their state in the first step, so a peak is often in the second.
        gpu: also predict a step's time on this card: a name ("rtx4090"), a size with a card's speed ("8GiB@t4"), or a
            `Card`; a size alone has no time. Its compute capability decides on attention's kernels; without a card
            that of the desktop cards of 2023.
        num_gpus: processes that run this together, each with its device; both functions are the first of them for
            torch.distributed and accelerate. DDP, FSDP2 and, through Accelerate, DeepSpeed's ZeRO run as they are;
            collectives take no time, and NCCL's own memory is not counted.

    Both functions run in a forked process: they may be closures, and change nothing here. Call it before the first
    backward on an accelerator: after that, torch's autograd does not survive a fork. cuBLAS's workspaces are counted,
    as torch does; the device context and workspaces of cuDNN, cuFFT and NCCL are not.

    Raises:
        ValueError: an argument is out of range; an operation has no fake implementation (named, with its module); no
            trainable parameter got a gradient; backward has run on an accelerator before; this process belongs to a
            process group and `num_gpus` is more than one; or `setup` or `step` raised it.
        IsolatedError: they raised another error.

    Cost: a few seconds and some hundred MB of host memory, for models of any size.

    Example:
        >>> def setup(device):
        ...     with device:
        ...         model = AutoModelForCausalLM.from_config(config)
        ...         batch = torch.zeros(8, 4096, dtype=torch.long)
        ...     return model, torch.optim.AdamW(model.parameters(), fused=True), batch
        >>> def step(state):
        ...     model, optimizer, batch = state
        ...     with torch.autocast("cuda", torch.bfloat16):
        ...         loss = model(batch, labels=batch).loss
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> estimate_peak_memory(setup, step).peak_bytes / 2**30
    """
    simulated = SimulatedStep(setup, step, num_steps, num_gpus=num_gpus)
    return run_isolated(lambda: _estimate(_run(simulated, gpu, like), gpu, simulated))


def simulate_step(
    simulated: SimulatedStep, *, gpu: str | Card | None = None, below: MemoryBelow | None = None
) -> MemoryEstimate:
    """Simulate a step in this process; of a model with many layers, those that repeat each other only once.

    Bytes are those of the whole simulation; times may differ in the last digits. `below` are the limits of host and
    disk; None, any host memory and no disk.
    """
    below = MemoryBelow() if below is None else below
    if simulated.repeated is not None:
        try:
            estimate = _estimate(_repeated(simulated.repeated, gpu), gpu, simulated)
            # A few layers do not show a limit that all of them together meet.
            room = below.host_bytes and host_bytes_beside_staging(default_host_budget(below.host_bytes))
            if room is None or estimate.host_bytes <= room:
                return estimate
        except NotRepeatedError as error:
            logger.debug("all layers are simulated: %s", error)
    return _estimate(_run(simulated, gpu, below=below), gpu, simulated)


def _repeated(repeated: RepeatedLayers, gpu: str | Card | None) -> _Run:
    """Run a model with a few groups of layers, and one with a group more, and add the others."""
    layers = repeated.layers
    few = layers.num_few * layers.period + layers.count % layers.period
    num_more = (layers.count - few) // layers.period - 1
    if num_more < 1:
        raise NotRepeatedError(f"there are but {layers.count} of them")
    shorter, longer = (_run(repeated.step_with(count), gpu) for count in (few, few + layers.period))
    each_adds = growth(shorter.history, longer.history, layers)
    if shorter.unreached != longer.unreached or shorter.guesses.keys() != longer.guesses.keys():
        raise NotRepeatedError("another layer adds assumptions, or weights without a gradient")
    return _Run(
        history=add_groups(longer.history, layers, num_more, each_adds),
        guesses=Counter(_continued(shorter.guesses, longer.guesses, num_more)),
        unreached=longer.unreached,
        phases_ms=_continued(shorter.phases_ms, longer.phases_ms, num_more),
        stalls_ms=_continued(shorter.stalls_ms, longer.stalls_ms, num_more),
    )


def _continued[N: (int, float)](first: Mapping[str, N], second: Mapping[str, N], num_more: int) -> dict[str, N]:
    return {key: figure + num_more * (figure - first[key]) for key, figure in second.items()}


def _run(
    simulated: SimulatedStep, gpu: str | Card | None, like: Like = "cuda", below: MemoryBelow | None = None
) -> _Run:
    for name in ("num_steps", "num_gpus"):
        COUNT.check(name, getattr(simulated, name))
    if like not in ("cuda", "cpu"):
        raise ValueError(f'like={like!r} is unknown; use "cuda", or "cpu" to compare with real runs on a CPU')
    counted, block_bytes = (DEVICE_TYPE, caching_allocator.BLOCK_BYTES) if like == "cuda" else ("cpu", 1)
    phases = StepPhases()
    below = MemoryBelow() if below is None else below
    clock = VirtualClock(DEFAULT_CARD if gpu is None else find_card(gpu), like, below.host_bytes_per_s)
    disk = VirtualDisk(clock, below.disk, phases)
    kernels = KernelMemory(clock.card.compute_capability)

    def observe(operation: Operation, phase: str) -> None:
        clock.charge(operation, phase)
        if operation.function.is_view:
            return
        if like == "cuda" and any(device_kind(leaf) == DEVICE_TYPE for leaf in operation.outputs):
            for owner, num_bytes, stays in kernels.taken_by(operation):
                kind = categories.WORKSPACE if stays else categories.TEMPORARY
                log.enter_block(num_bytes, kind, owner, stays=stays)
        for kind, tensors in categories.exchanged(operation):
            labels.add_unlabelled(tensors, kind)  # some gather in place

    log = AllocationLog(counted, block_bytes, phases, observe)
    labels = StepLabels(log)
    base = VirtualBase(disk, labels)

    def free_host_bytes() -> int:
        # Host memory of a run is a result, and no matter of this machine.
        return sys.maxsize if below.host_bytes is None else max(0, below.host_bytes - log.history.host_bytes())

    simulated.build()
    with simulation(like, base, free_host_bytes) as (device, data_dependent):
        in_group = simulated.has_group or simulated.num_gpus > 1
        ranks = first_of(simulated.num_gpus, device, base) if in_group else nullcontext()
        with log, log.following_resizes(), labels.following(), ranks:
            state = simulated.setup(device)
            labels.add_state(state)
            for _ in range(simulated.num_steps):
                log.history.step_begins.append(log.history.position)
                phases.begin_step()
                clock.begin_step()
                disk.begin_step()
                base.begin_step()
                simulated.step(state)
                clock.end_step(phases.name)
            unreached = labels.unreached()
        # Closed before the simulation ends, which frees the casts that autocast has cached.
        history = log.closed()
    unreached = () if simulated.is_trainers_own else unreached
    streamed = base.estimate(categories.peak_of(history, categories.STREAMED)) if base.is_used else None
    times = clock.phases_ms, clock.stalls_ms
    return _Run(history, data_dependent.guesses, unreached, *times, disk.peak_bytes, disk.step_written, streamed)


def _estimate(run: _Run, gpu: str | Card | None, simulated: SimulatedStep) -> MemoryEstimate:
    history = run.history
    trace = history.trace()
    peak_bytes, peak_at = trace.peak()
    live = categories.alive_at(history, trace.positions[peak_at])
    guesses = tuple(f"{what} ({count} times)" for what, count in run.guesses.items())
    assumptions = simulated.assumptions + guesses
    step_ms = sum(run.phases_ms.values())
    card = None if gpu is None else find_card(gpu)
    expected = time_range(card) if card is not None and card.is_named else None
    return MemoryEstimate(
        peak_bytes=peak_bytes,
        reserved_bytes=trace.unlimited.peak_reserved_bytes,
        phase=trace.phases[peak_at],
        step=sum(begin <= trace.positions[peak_at] for begin in history.step_begins),
        phases=trace.peaks_by_phase(),
        breakdown=categories.breakdown(live, peak_bytes),
        top=_largest(live),
        host_bytes=history.host_peak_bytes(),
        disk_bytes=run.disk_bytes,
        disk_bytes_written=sum(run.written.values()),
        update_bytes_written=run.written.get(OPTIMIZER, 0),
        confidence="low" if run.unreached else "medium" if assumptions else "high",
        assumptions=assumptions,
        unreached=run.unreached,
        step_ms=None if expected is None else step_ms,
        step_range_ms=None if expected is None else (step_ms * expected.low, step_ms * expected.high),
        phases_ms={} if expected is None else dict(run.phases_ms),
        stall_ms=None if expected is None else sum(run.stalls_ms.values()),
        update_stall_ms=sum(ms for phase, ms in run.stalls_ms.items() if phase not in (FORWARD, BACKWARD)),
        trace=trace,
        storage_kinds=categories.of_storages(history),
        storage_makers=tuple((record.owner, record.operation) for record in history.records),
        streamed=run.streamed,
        num_gpus=simulated.num_gpus,
        notes=simulated.notes,
    )


# A number between dots, or at an end, as layers have it.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _largest(live: list[tuple[str, StorageRecord]]) -> tuple[LargeTensor, ...]:
    groups: dict[tuple[Any, ...], list[StorageRecord]] = {}
    for kind, record in live:
        alike = kind, _NUMBER.sub("*", record.owner), record.operation, record.shape, record.dtype, record.num_bytes
        groups.setdefault(alike, []).append(record)
    by_size = sorted(groups.items(), key=lambda group: -sum(record.num_bytes for record in group[1]))
    return tuple(_large(kind, records) for (kind, *_), records in by_size[:_NUM_TOP])


def _large(kind: str, alike: list[StorageRecord]) -> LargeTensor:
    owners = {record.owner for record in alike}
    owner = owners.pop() if len(owners) == 1 else _NUMBER.sub("*", alike[0].owner)
    first, dtype = alike[0], str(alike[0].dtype).removeprefix("torch.")
    return LargeTensor(kind, owner, first.operation, first.shape, dtype, first.num_bytes, len(alike))
