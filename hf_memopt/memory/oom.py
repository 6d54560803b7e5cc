"""Explains an out-of-memory error by the tensors that held the memory."""

import logging
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from hf_memopt.memory.attribution import PARAMETER, SAVED, LiveTensors, live_optimizers, live_tensors, plain_tensors
from hf_memopt.memory.device_counters import counters_for
from hf_memopt.memory.ranks import rank_among_several
from hf_memopt.units import format_bytes

logger = logging.getLogger(__name__)

_HEADER = "Out-of-memory report"
_NUM_LARGEST = 10

OFFLOADING = "activation offloading"
CHECKPOINTING = "activation checkpointing"
HALF_MICRO_BATCH = "half the micro-batch"
FROZEN_WEIGHTS = "frozen weights on the host"


@contextmanager
def explain_oom(
    model: nn.Module | None = None, *, output_dir: Path | str | None = None, flags: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Adds a report to a `torch.OutOfMemoryError` that is raised inside, as a note, and lets it go on.

    The report, which Python prints below the traceback, tells in which phase and module memory ran out, the live
    tensors by kind, the largest of them with their modules, and the bytes that each remedy would have saved. It also
    decorates a function: `trainer.train = explain_oom(trainer.model)(trainer.train)`.

    The very error that came always leaves: a failure of the report is logged with its traceback. No tensor operation
    runs, no device memory is requested, and nothing is kept alive that the error does not keep. Free until there is an
    error. Other errors pass untouched; among them those of a CPU without memory, and of libraries that take memory past
    torch's allocator, which raise a plain RuntimeError.

    Args:
        model: gives tensors their owners; without it there are kinds and shapes only.
        output_dir: folder for the report (`out_of_memory_rank<r>.txt`), and, if the CUDA allocator's history was being
            recorded, its snapshot (`out_of_memory_rank<r>.pickle`, for https://pytorch.org/memory_viz). It is created.
            None writes nothing.
        flags: how a program's user switches remedies on, by their names (`OFFLOADING`, ...), in place of the Python
            calls; the others are left out. None names all remedies and the calls.

    Example:
        >>> with explain_oom(model, output_dir="outputs/run"):
        ...     trainer.train()
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if not any(note.startswith(_HEADER) for note in getattr(error, "__notes__", ())):
            try:
                report = _report(error, model, flags)
                if output_dir is not None:
                    report = f"{report}\n{_write(report, Path(output_dir))}"
                error.add_note(report)
            except Exception:
                # The user has to see the error, even if its report fails.
                logger.exception("the out-of-memory report failed; the out-of-memory error itself follows")
        raise


@dataclass(frozen=True, slots=True)
class Remedy:
    """A way to need less memory: the most that it would have saved, and how to switch it on, with its cost."""

    name: str
    saved_bytes: int
    how: str


def remedies(model: nn.Module | None, live: Sequence[LiveTensors], phase: str) -> list[Remedy]:
    """Return the bytes that each remedy would have saved in this phase, most first. Upper limits, not estimates."""
    num_saved_bytes = sum(group.num_bytes for group in live if group.kind == SAVED)
    temporary_bytes = sum(_foreach_bytes(optimizer) for optimizer in live_optimizers())
    parameters = model.named_parameters() if model is not None else ()
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    found = [
        Remedy(
            OFFLOADING,
            num_saved_bytes,
            "ActivationOffloader, or hf_memopt.attach(trainer, offloader='auto'): the same gradients, copies over the "
            "host link",
        ),
        Remedy(
            CHECKPOINTING,
            num_saved_bytes,
            "model.gradient_checkpointing_enable(), or SelectiveCheckpoint: the inputs of checkpointed blocks stay, "
            "and forward is computed again",
        ),
        Remedy(
            HALF_MICRO_BATCH,
            num_saved_bytes // 2,
            "half of per_device_train_batch_size with twice gradient_accumulation_steps: the same effective batch",
        ),
        Remedy(
            "fused optimizer",
            temporary_bytes if phase == "optimizer" else 0,
            "optim='adamw_torch_fused', or fused=True: no temporary copies of the parameters in the optimizer phase "
            f"(there, up to {format_bytes(temporary_bytes)})",
        ),
        Remedy(
            FROZEN_WEIGHTS,
            sum(group.num_bytes for group in live if group.kind == PARAMETER and group.owner in frozen),
            "a frozen base in StreamedWeights, made before the Trainer, or a frozen teacher in OffloadedTeacher: their "
            "weights are on the device only while they are read",
        ),
    ]
    return sorted(found, key=lambda remedy: -remedy.saved_bytes)


def _report(error: BaseException, model: nn.Module | None, flags: Mapping[str, str] | None) -> str:
    device = _device(model)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    live = live_tensors(model, device.type)
    module = _failing_module(frames, model)
    phase = _phase(frames)
    lines = [f"{_HEADER}: the {phase} phase{f', in {module}' if module else ''}"]
    lines += [*_device_lines(device), *_kind_lines(live), *_largest_lines(live)]
    lines += ["", "What each remedy would have saved, at most:"]
    for remedy in remedies(model, live, phase):
        how = remedy.how if flags is None else flags.get(remedy.name)
        if how is not None:
            lines.append(f"  {format_bytes(remedy.saved_bytes):>10}  {remedy.name}: {how}")
    return "\n".join(lines)


def _phase(frames: list[FrameType]) -> str:
    entered = [(frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name) for frame in frames]
    # An optimizer's step calls a closure, as in Lightning, that runs forward and backward.
    closures = [number for number, (_, name) in enumerate(entered) if name == "closure"]
    entered = entered[closures[-1] if closures else 0 :]
    # Backward comes first: recomputed forwards, and optimizers that step in its hooks, run inside of it.
    if any(name == "_engine_run_backward" and file.endswith("torch/autograd/graph.py") for file, name in entered):
        return "backward"
    if any("/torch/optim/" in file for file, _ in entered):
        return "optimizer"
    if any(name in ("evaluation_loop", "prediction_step", "evaluate", "predict") for _, name in entered):
        return "evaluation"
    return "forward"


def _failing_module(frames: list[FrameType], model: nn.Module | None) -> str:
    if model is None:
        return ""
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    running = [names[id(owner)] for frame in frames if id(owner := frame.f_locals.get("self")) in names]
    return running[-1] if running else ""


def _device_lines(device: torch.device) -> list[str]:
    counters = counters_for(device) if device.type != "cpu" else None
    if counters is None:
        return []
    now = counters.read()
    free_bytes, total_bytes = counters.free_and_total()
    return [
        f"Of {format_bytes(total_bytes)} on {device}: {format_bytes(now.allocated_bytes)} in tensors, "
        f"{format_bytes(now.reserved_bytes - now.allocated_bytes)} reserved beside them "
        f"({format_bytes(now.inactive_split_bytes)} of it in pieces between tensors), "
        f"{format_bytes(total_bytes - free_bytes - now.reserved_bytes)} used by others and by the device context, "
        f"{format_bytes(free_bytes)} free."
    ]


def _kind_lines(live: list[LiveTensors]) -> list[str]:
    by_kind: Counter[str] = Counter()
    for group in live:
        by_kind[group.kind] += group.num_bytes
    lines = (f"  {format_bytes(num_bytes):>10}  {kind}" for kind, num_bytes in by_kind.most_common())
    return ["", "Live tensors:", *lines]


def _largest_lines(live: list[LiveTensors]) -> list[str]:
    """Return the largest groups of tensors; layers that differ by a number in their names count as one."""
    counts: Counter[str] = Counter()
    bytes_of: Counter[str] = Counter()
    for group in live:
        owner = re.sub(r"(?:(?<=\.)|(?<=\s)|^)\d+(?=\.)", "*", group.owner)
        what = f"{group.shape} {str(group.dtype).removeprefix('torch.')}, {group.kind}{f': {owner}' if owner else ''}"
        counts[what] += group.count
        bytes_of[what] += group.num_bytes
    largest = bytes_of.most_common(_NUM_LARGEST)
    return ["", "The largest:", *(f"  {format_bytes(held):>10}  {counts[what]} x {what}" for what, held in largest)]


def _write(report: str, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / f"out_of_memory_rank{rank_among_several() or 0}.txt"
    text.write_text(report + "\n")
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return f"\nWritten to {text}. There is no allocator snapshot, which needs CUDA."
    if not torch._C._cuda_isHistoryEnabled():
        return (
            f"\nWritten to {text}. For a snapshot of the allocator as well, call "
            "torch.cuda.memory._record_memory_history(max_entries=100_000, stacks='python') before training."
        )
    snapshot = text.with_suffix(".pickle")
    torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
    return f"\nWritten to {text}. Drop {snapshot} on https://pytorch.org/memory_viz to see the allocator's history."


def _device(model: nn.Module | None) -> torch.device:
    first = next(model.parameters(), None) if model is not None else None
    if first is not None:
        return first.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _foreach_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that a step over lists of tensors needs for a moment: about a copy of the updated parameters."""
    return sum(
        tensor.untyped_storage().nbytes()
        for group in optimizer.param_groups
        if "foreach" in group and not group.get("fused")
        for parameter in group["params"]
        # The default, None, means lists of tensors on accelerators.
        if parameter.requires_grad and (group["foreach"] or (group["foreach"] is None and not parameter.is_cpu))
        for tensor in plain_tensors(parameter)
    )
