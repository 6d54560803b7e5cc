"""Memory figures for people, for experiment trackers and for the file of a run.

The file has one JSON object per logged step: `{"step": 40, "memory/allocated_gib": 3.1, ...}`.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hf_memopt.memory.device_counters import Counters
from hf_memopt.memory.ranks import gather_from_ranks
from hf_memopt.memory.tracker import MemoryReading, MemoryTracker, PhasePeak
from hf_memopt.ranges import COUNT, COUNT_OR_ZERO, Range
from hf_memopt.text_table import align
from hf_memopt.units import GIB, format_bytes, format_gib

logger = logging.getLogger(__name__)

METRICS_FILE = "memory.jsonl"
PEAK_RANK = "memory/peak_rank"
WARN_AT = Range(above=0, at_most=1, why=": a share of the device's memory")

_REMEDIES = {
    "optimizer": "use a fused optimizer (optim='adamw_torch_fused', or fused=True), which needs no temporary copies of "
    "the parameters",
    "teacher": "let the teacher visit the device only when it is called (OffloadedTeacher, mode='swap')",
    "evaluation": "evaluate in smaller batches, and move predictions to the host earlier (eval_accumulation_steps)",
}
_ACTIVATIONS_REMEDY = (
    "offload activations (ActivationOffloader, or hf_memopt.attach(trainer, offloader='auto')), recompute them "
    "(gradient checkpointing), or halve the micro-batch and double gradient_accumulation_steps"
)
_FRAGMENTATION_REMEDY = "set PYTORCH_ALLOC_CONF=expandable_segments:True before the start, against fragmentation"


def memory_metrics(tracker: MemoryTracker, reading: MemoryReading) -> dict[str, float]:
    """Return figures for an experiment tracker, each with its unit in the key, as far as the device has counters.

    Peaks are those since the tracker was made. A phase's peak is `memory/<phase>_peak_gib` where it is known exactly,
    and otherwise between `memory/<phase>_peak_at_least_gib` and `memory/<phase>_peak_at_most_gib`.
    """
    host = reading.host
    figures = {"memory/host_rss_gib": _gib(host.rss_bytes), "memory/pinned_gib": _gib(host.pinned_bytes)}
    if host.offload.num_allocations:
        figures["memory/offload_gib"] = _gib(host.offload.num_bytes)
        figures["memory/num_offload_allocations"] = float(host.offload.num_allocations)
    if host.disk.num_bytes_written:
        figures["memory/disk_gib"] = _gib(host.disk.num_bytes)
        figures["memory/disk_written_gib"] = _gib(host.disk.num_bytes_written)
    if reading.device is not None:
        device, counters = reading.device, reading.device.counters
        figures |= {
            "memory/peak_allocated_gib": _gib(device.highest_bytes),
            "memory/allocated_gib": _gib(counters.allocated_bytes),
            "memory/reserved_gib": _gib(counters.reserved_bytes),
            "memory/fragmentation_gib": _gib(device.fragmentation_bytes),
            "memory/inactive_split_gib": _gib(counters.inactive_split_bytes),
            "memory/num_alloc_retries": float(counters.num_alloc_retries),
            "memory/elsewhere_gib": _gib(device.elsewhere_bytes),
        }
    for name, peak in tracker.peaks.items():
        figures |= _phase_metrics(name, peak)
    return {key: value for key, value in figures.items() if value is not None}


def largest_of_ranks(metrics: dict[str, float]) -> dict[str, float]:
    """Return the largest of each figure over all ranks, which call together; `memory/peak_rank` is that with most."""
    of_ranks = gather_from_ranks(metrics)
    if len(of_ranks) == 1:
        return metrics
    largest = {key: max(rank[key] for rank in of_ranks if key in rank) for rank in of_ranks for key in rank}
    deciding = "memory/peak_allocated_gib" if "memory/peak_allocated_gib" in largest else "memory/host_rss_gib"
    largest[PEAK_RANK] = max(range(len(of_ranks)), key=lambda rank: of_ranks[rank].get(deciding, 0.0))
    return largest


def high_memory_message(tracker: MemoryTracker, reading: MemoryReading, warn_at: float) -> str | None:
    """Return the changes to try, if the peak has reached the share `warn_at` of this process's memory; else None."""
    if reading.device is None:
        return None
    highest_bytes, room_bytes = reading.device.highest_bytes, reading.device.room_bytes
    if highest_bytes < warn_at * room_bytes:
        return None
    phase = tracker.peak_phase
    remedies = [_REMEDIES.get(phase or "", _ACTIVATIONS_REMEDY)]
    if reading.device.fragmentation_bytes > highest_bytes / 10:
        remedies.append(_FRAGMENTATION_REMEDY)
    return (
        f"high device memory: {highest_bytes / GIB:.2f} of {format_gib(room_bytes)} ({highest_bytes / room_bytes:.0%}) "
        f"at the peak{f', in the {phase} phase' if phase else ''}. To lower it: {'; '.join(remedies)}."
    )


def short_figure(tracker: MemoryTracker) -> str:
    """Return the peak for a progress bar, `GPU: 14.2GB`, in units of 1e9 bytes; host memory without counters."""
    return f"{'GPU' if tracker.has_counters else 'host'}: {tracker.highest_bytes / 1e9:.1f}GB"


def phase_table(peaks: Mapping[str, PhasePeak]) -> str:
    """Return the peaks of phases, as in `MemoryTracker.peaks`, as lines of text."""
    rows: list[tuple[str, ...]] = [("phase", "peak allocated", "reserved", "inactive splits", "retries")]
    if all(peak.at_most_bytes is None for peak in peaks.values()):
        rows = [("phase", "host memory")]
    rows += [_phase_row(name, peak) for name, peak in peaks.items()]
    return "\n".join(align(rows))


class MemoryLogger:
    """Logs memory through an `Accelerator`, to the trackers that it was given.

    Example:
        >>> memory = MemoryLogger(accelerator)
        >>> for step, batch in enumerate(batches):
        ...     ...
        ...     memory.log(step)

    Between them, `with memory.phase("forward"):` and so on tell phases apart.

    Args:
        accelerator: an `accelerate.Accelerator`.
        log_every: log at steps that are multiples of this.
        warn_at: warn, once, when the peak reaches this share of the device memory that the process can have.
        output_dir: folder of the run, whose `memory.jsonl` gets the same figures for `hf-memopt report`. None, no file.
        reset_peaks: see `MemoryTracker`.
        counters: see `MemoryTracker`.

    Raises:
        ValueError: `log_every` or `warn_at` out of range.
    """

    def __init__(
        self,
        accelerator: Any,
        *,
        log_every: int = 10,
        warn_at: float = 0.85,
        output_dir: Path | str | None = None,
        reset_peaks: bool = False,
        counters: Counters | None = None,
    ) -> None:
        COUNT.check("log_every", log_every)
        WARN_AT.check("warn_at", warn_at)
        self.tracker = MemoryTracker(accelerator.device, reset_peaks=reset_peaks, counters=counters)
        self._accelerator = accelerator
        self._log_every = log_every
        self._warn_at: float | None = warn_at
        self._file = None if output_dir is None else Path(output_dir) / METRICS_FILE

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Charge the memory of the code inside to the phase `name`."""
        return self.tracker.phase(name)

    def log(self, step: int) -> Mapping[str, float] | None:
        """End a step. Every rank has to call it with the same `step`; returns the logged figures, if any."""
        self.tracker.step()
        if step % self._log_every:
            return None
        reading = self.tracker.read()
        if self._warn_at is not None and (message := high_memory_message(self.tracker, reading, self._warn_at)):
            logger.warning("%s", message)
            self._warn_at = None
        metrics = largest_of_ranks(memory_metrics(self.tracker, reading))
        self._accelerator.log(metrics, step=step)
        if self._file is not None and self._accelerator.is_main_process:
            append_metrics(self._file, step, metrics)
        return metrics


def _phase_row(name: str, peak: PhasePeak) -> tuple[str, ...]:
    if peak.at_most_bytes is None:
        return name, format_bytes(peak.host_rss_bytes or 0)
    least, most = format_bytes(peak.at_least_bytes or 0), format_bytes(peak.at_most_bytes or 0)
    reserved, inactive = format_bytes(peak.reserved_bytes or 0), format_bytes(peak.inactive_split_bytes or 0)
    return name, most if peak.exact else f"{least} to {most}", reserved, inactive, str(peak.num_alloc_retries)


def _phase_metrics(name: str, peak: PhasePeak) -> dict[str, float | None]:
    if peak.at_most_bytes is None:
        return {f"memory/{name}_host_rss_gib": _gib(peak.host_rss_bytes)}
    if peak.exact:
        return {f"memory/{name}_peak_gib": _gib(peak.at_most_bytes)}
    return {
        f"memory/{name}_peak_at_least_gib": _gib(peak.at_least_bytes),
        f"memory/{name}_peak_at_most_gib": _gib(peak.at_most_bytes),
    }


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / GIB


def append_metrics(file: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Add one line; the folder is made if it is missing. In a distributed run one rank should call this.

    Args:
        file: `memory.jsonl` of the run's folder, so that `hf-memopt report` finds it.
        step: number of optimizer steps so far.
        metrics: figures by name.

    Raises:
        ValueError: `step` is no count, or a metric is called `step`.
    """
    COUNT_OR_ZERO.check("step", step)
    if "step" in metrics:
        raise ValueError(f"metrics have a key 'step' ({metrics['step']}), which is the step's own; rename it")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"step": step, **metrics}) + "\n")


def read_metrics(file: Path) -> list[dict[str, float]]:
    """Return all lines by step, of a step logged again the later one; a ValueError for one without a step."""
    by_step = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            by_step[int(record["step"])] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}, line {number}, is not a JSON object with a 'step': {line[:60]!r}; remove it"
            ) from error
    return [by_step[step] for step in sorted(by_step)]
