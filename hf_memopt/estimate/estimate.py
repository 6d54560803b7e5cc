"""Peak memory of a training step, without the accelerator that it is for."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from hf_memopt.estimate.accounting import allocation_log, caching_allocator, categories
from hf_memopt.estimate.accounting.allocation_log import AllocationLog, StepPhases, StorageRecord, tensors_in
from hf_memopt.estimate.accounting.categories import StepLabels
from hf_memopt.estimate.accounting.kernel_memory import KernelMemory
from hf_memopt.estimate.estimate_report import LargeTensor, MemoryEstimate
from hf_memopt.estimate.gpus import DEFAULT_CARD, Card, find_card
from hf_memopt.estimate.simulation.child_process import run_isolated
from hf_memopt.estimate.simulation.device import DEVICE_TYPE, simulation
from hf_memopt.estimate.simulation.virtual_time import VirtualClock
from hf_memopt.ranges import COUNT

Like = Literal["cuda", "cpu"]

# How many tensors `MemoryEstimate.top` lists.
_NUM_TOP = 10


def estimate_peak_memory(
    setup: Callable[[Any], Any],
    step: Callable[[Any], Any],
    *,
    like: Like = "cuda",
    num_steps: int = 2,
    gpu: str | Card | None = None,
) -> MemoryEstimate:
    """Run whole training steps on tensors without memory and report the most that was alive at one time.

    Args:
        setup: called with a device, builds model, optimizer and batch there. What it returns is passed to `step`.
        step: one training step, up to and including `optimizer.step()` and `zero_grad()`.
        like: whose autocast, attention and allocation rules; "cpu" is there to be compared with real runs on a CPU.
        num_steps: how many steps; optimizers make their state in the first, so a peak is often in the second.
        gpu: also predict how long a step takes on this card, by a roofline: for ratios, not for milliseconds. A name
            ("rtx4090"), a size of memory ("8GiB"), or a `Card`. Its compute capability decides which kernels attention
            runs; without a card that of the desktop cards of 2023.

    Both functions run in a forked process, so they may be closures and change nothing here. No weight is allocated.
    Call it before the first backward on an accelerator: torch's autograd does not survive a fork after that.
    Workspaces of cuBLAS are counted, as torch counts them; the device context and workspaces of cuDNN, cuFFT and NCCL
    are not.

    Raises:
        ValueError: `like` or `gpu` is unknown, or `num_steps` is no count; an operation has no fake implementation
            (named, with its module); no trainable parameter got a gradient; backward has run on an accelerator before;
            or `setup` or `step` raised it.
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
    return run_isolated(lambda: simulate(setup, step, like=like, num_steps=num_steps, gpu=gpu))


def simulate(
    setup: Callable[[Any], Any],
    step: Callable[[Any], Any],
    *,
    like: Like = "cuda",
    num_steps: int = 2,
    gpu: str | Card | None = None,
) -> MemoryEstimate:
    """Do the work of `estimate_peak_memory` in this process, which is then good for simulations alone."""
    COUNT.check("num_steps", num_steps)
    if like not in ("cuda", "cpu"):
        raise ValueError(f'like={like!r} is unknown; use "cuda", or "cpu" to compare with real runs on a CPU')
    device_type, block_bytes = (DEVICE_TYPE, caching_allocator.BLOCK_BYTES) if like == "cuda" else ("cpu", 1)
    # Each part knows those before it: the phase is told to the log, and the log to whoever labels what is in it.
    phases = StepPhases()
    clock = VirtualClock(DEFAULT_CARD if gpu is None else find_card(gpu))
    kernels = KernelMemory(clock.card.compute_capability)

    def observe(function: Any, args: Any, kwargs: Any, result: Any, phase: str) -> None:
        clock.charge(function, args, kwargs, result, phase)
        if like == "cuda" and any(allocation_log.device_type(leaf) == DEVICE_TYPE for leaf in tensors_in(result)):
            for block in kernels.taken_by(function, args):
                kind = categories.WORKSPACE if block.stays else categories.TEMPORARY
                log.enter_block(block.num_bytes, kind, block.owner, stays=block.stays)

    log = AllocationLog(device_type, block_bytes, phases, observe)
    labels = StepLabels(log, phases)
    begins = []
    with simulation(like, clock, phases, labels.add_teacher_block) as (device, data_dependent):
        with log, labels.following():
            state = setup(device)
            labels.add_state(state)
            for _ in range(num_steps):
                begins.append(len(log.changes))
                phases.begin_step()
                clock.begin_step()
                step(state)
            unreached = labels.unreached()
        # Read before the simulation ends, which frees what autocast has cached.
        return _estimate(log, begins, data_dependent.guesses, unreached, None if gpu is None else clock)


def _estimate(
    log: AllocationLog, begins: list[int], guesses: Counter[str], unreached: tuple[str, ...], clock: VirtualClock | None
) -> MemoryEstimate:
    """Read the answer off the log; `begins` are the positions in it at which the steps began."""
    trace = log.trace(begins[0])
    peak_bytes, peak_at = trace.peak()
    live = categories.alive_at(log, trace.positions[peak_at])
    assumptions = tuple(f"{what} ({count} times)" for what, count in guesses.items())
    return MemoryEstimate(
        peak_bytes=peak_bytes,
        reserved_bytes=trace.unlimited.peak_reserved_bytes,
        phase=trace.phases[peak_at],
        step=sum(begin <= trace.positions[peak_at] for begin in begins),
        phases=trace.peaks_by_phase(),
        breakdown=categories.breakdown(live, peak_bytes),
        top=tuple(_large(kind, record) for kind, record in live[:_NUM_TOP]),
        host_bytes=log.host_peak_bytes(begins[0]),
        confidence="low" if unreached else "medium" if assumptions else "high",
        assumptions=assumptions,
        unreached=unreached,
        step_ms=sum(clock.phases_ms.values()) if clock else None,
        phases_ms=clock.phases_ms if clock else {},
        stall_ms=clock.stall_ms if clock else None,
        trace=trace,
        storage_kinds=categories.of_storages(log),
    )


def _large(kind: str, record: StorageRecord) -> LargeTensor:
    dtype = str(record.dtype).removeprefix("torch.")
    return LargeTensor(kind, record.owner, record.operation, record.shape, dtype, record.num_bytes)
