"""Peak memory of a training step, without the accelerator that it is for."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from hf_memopt.estimate.accounting import caching_allocator, categories
from hf_memopt.estimate.accounting.allocation_log import Ledger, StorageRecord
from hf_memopt.estimate.accounting.labels import StepWatch
from hf_memopt.estimate.accounting.memory_trace import Trace
from hf_memopt.estimate.accounting.step_phases import Phases
from hf_memopt.estimate.gpus import DEFAULT_CARD, Card
from hf_memopt.estimate.simulation.child_process import run_isolated
from hf_memopt.estimate.simulation.data_dependent import Unknowns
from hf_memopt.estimate.simulation.device import DEVICE_TYPE, simulation
from hf_memopt.estimate.simulation.virtual_time import VirtualClock
from hf_memopt.ranges import COUNT

Like = Literal["cuda", "cpu"]

# How many tensors `MemoryEstimate.top` lists.
_NUM_TOP = 10


@dataclass(frozen=True, slots=True)
class LargeTensor:
    """A storage that is alive at the peak."""

    kind: str
    owner: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What a training step is predicted to hold.

    Attributes:
        peak_bytes: the most that tensors hold on the device, rounded as the allocator does: the counterpart of
            `torch.cuda.max_memory_allocated()`.
        reserved_bytes: what the caching allocator then holds from the device, by a model of it.
        phase: in which the peak is reached: forward, backward, optimizer, or outside of these.
        step: in which step, counted from 1.
        phases: the peak of each phase, bytes.
        breakdown: bytes at the peak, by what they are for.
        top: the largest storages alive at the peak.
        host_bytes: the most that tensors hold in host memory: the offloaded ones and what else the step keeps there.
        confidence: "high": nothing was assumed; "medium": `assumptions` lists guesses that may change memory; "low":
            trainable parameters got no gradient, so that part of the model may not have run.
        assumptions: what was assumed.
        unreached: trainable parameters without a gradient.
        step_ms: what the last step would take on `card`; None without one.
        phases_ms: the same by phase.
        stall_ms: for how long compute would wait for copies in it.
        trace: every change of device memory; says, for instance, whether the run fits into a number of bytes.
        storage_kinds: what each storage of `trace` is for, by its number.
    """

    peak_bytes: int
    reserved_bytes: int
    phase: str
    step: int
    phases: dict[str, int]
    breakdown: dict[str, int]
    top: tuple[LargeTensor, ...]
    host_bytes: int
    confidence: str
    assumptions: tuple[str, ...]
    unreached: tuple[str, ...]
    step_ms: float | None
    phases_ms: dict[str, float]
    stall_ms: float | None
    trace: Trace
    storage_kinds: tuple[str, ...]


def estimate_peak_memory(
    setup: Callable[[Any], Any],
    step: Callable[[Any], Any],
    *,
    like: Like = "cuda",
    num_steps: int = 2,
    card: Card | None = None,
) -> MemoryEstimate:
    """Runs whole training steps on tensors without memory and reports the most that was alive at one time.

    Args:
        setup: called with a device, builds model, optimizer and batch there. What it returns is passed to `step`.
        step: one training step, up to and including `optimizer.step()` and `zero_grad()`.
        like: whose autocast, attention and allocation rules; "cpu" is there to be compared with real runs on a CPU.
        num_steps: how many steps; optimizers make their state in the first, so a peak is often in the second.
        card: also predict how long a step takes on this card, by a roofline: for ratios, not for milliseconds. Its
            compute capability decides which kernels attention runs; without a card that of the desktop cards of 2023.

    Both functions run in a forked process, so they may be closures and change nothing here. No weight is allocated.
    Call it before the first backward on an accelerator: torch's autograd does not survive a fork after that.
    Not counted: the device context, workspaces of cuBLAS, cuDNN, cuFFT and NCCL, which are not tensors.

    Raises:
        ValueError: `like` is unknown or a number out of its range; an operation has no fake implementation (named,
            with its module); no trainable parameter got a gradient; backward has run on an accelerator before; or
            `setup` or `step` raised it.
        IsolatedError: they raised another error.

    Cost: a few seconds and some hundred MB of host memory, whatever the model's size.

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
    options = SimulationOptions(like, num_steps, card)
    return run_isolated(lambda: simulate(setup, step, options))


@dataclass(frozen=True)
class SimulationOptions:
    """See `estimate_peak_memory`."""

    like: Like = "cuda"
    num_steps: int = 2
    card: Card | None = None

    def __post_init__(self) -> None:
        if self.like not in ("cuda", "cpu"):
            raise ValueError(f'like={self.like!r} is unknown; use "cuda", or "cpu" to compare with real runs on a CPU')
        COUNT.check("num_steps", self.num_steps)


def simulate(setup: Callable[[Any], Any], step: Callable[[Any], Any], options: SimulationOptions) -> MemoryEstimate:
    """`estimate_peak_memory` in this process, which is then good for simulations alone."""
    phases = Phases()
    device_type, block_bytes = (DEVICE_TYPE, caching_allocator.BLOCK_BYTES) if options.like == "cuda" else ("cpu", 1)
    with ExitStack() as stack:
        clock = VirtualClock(options.card or DEFAULT_CARD)
        times = StepTimes(clock, phases)
        ledger = Ledger(device_type, block_bytes, phases, times.charge)
        watch = StepWatch(ledger, phases)
        device, unknowns = stack.enter_context(
            simulation(options.like, clock, lambda: phases.module, watch.see_teacher)
        )
        begins = []
        with ledger, phases.following(watch.add_root, watch.see_optimizer):
            state = setup(device)
            watch.add_state(state)
            for _ in range(options.num_steps):
                begins.append(len(ledger.log))
                phases.begin_step()
                times.begin_step()
                step(state)
            unreached = watch.unreached()
        return _estimate(ledger, begins, unknowns, unreached, times if options.card else None)


class StepTimes:
    """How long the phases of the newest step took on the virtual clock, if there is one."""

    def __init__(self, clock: VirtualClock, phases: Phases) -> None:
        self.phases_ms: dict[str, float] = {}
        self.stall_ms = 0.0
        self._clock, self._phases = clock, phases
        self._booked_s = self._stalled_s = 0.0

    def begin_step(self) -> None:
        self.phases_ms = {}
        self._booked_s, self._stalled_s = self._clock.now_s, self._clock.stalled_s

    def charge(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Let an operation take its time, and book all time since the last one."""
        self._clock.charge(function, args, kwargs, result)
        spent_ms = 1e3 * (self._clock.now_s - self._booked_s)
        self.phases_ms[self._phases.name] = self.phases_ms.get(self._phases.name, 0.0) + spent_ms
        self._booked_s = self._clock.now_s
        self.stall_ms = 1e3 * (self._clock.stalled_s - self._stalled_s)


def _estimate(
    ledger: Ledger, begins: list[int], unknowns: Unknowns, unreached: tuple[str, ...], times: StepTimes | None
) -> MemoryEstimate:
    trace = ledger.trace(begins[0])
    peak_bytes, peak_at = trace.peak()
    live = categories.alive_at(ledger, trace.positions[peak_at])
    guesses = tuple(f"{what} ({count} times)" for what, count in unknowns.guesses.items())
    return MemoryEstimate(
        peak_bytes=peak_bytes,
        reserved_bytes=trace.allocator().peak_reserved_bytes,
        phase=trace.phases[peak_at],
        step=sum(begin <= trace.positions[peak_at] for begin in begins),
        phases=trace.peaks_by_phase(),
        breakdown=categories.breakdown(live),
        top=tuple(_large(kind, record) for kind, record in live[:_NUM_TOP]),
        host_bytes=ledger.host_peak_bytes(begins[0]),
        confidence="low" if unreached else "medium" if guesses else "high",
        assumptions=guesses,
        unreached=unreached,
        step_ms=sum(times.phases_ms.values()) if times else None,
        phases_ms=times.phases_ms if times else {},
        stall_ms=times.stall_ms if times else None,
        trace=trace,
        storage_kinds=categories.of_storages(ledger),
    )


def _large(kind: str, record: StorageRecord) -> LargeTensor:
    dtype = str(record.dtype).removeprefix("torch.")
    return LargeTensor(kind, record.owner, record.operation, record.shape, dtype, record.num_bytes)
