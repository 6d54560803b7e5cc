"""An estimate and its forms: words, tables and JSON."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from hf_memopt.planning.accounting.allocation_log import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE
from hf_memopt.planning.accounting.caching_allocator import MemoryTrace
from hf_memopt.planning.accounting.categories import ACTIVATION, TEMPORARY, UNUSED, StreamedEstimate
from hf_memopt.planning.cards.gpus import Card, allowances, family_of, find_card, nccl_bytes
from hf_memopt.text_table import Cell, Table, align
from hf_memopt.units import GIB, MIB, format_gib, format_ms

_MAX_NAMES = 5
_CONFIDENCE = {
    "high": "high, nothing had to be assumed",
    "medium": "medium, memory is as predicted if these assumptions hold; if you doubt one, measure a step",
    "low": "low, part of the model may not have run; see that the batch and the task use all that is to be trained",
}
_DAY_MS = 86_400_000
# Share of the allocator's memory by which nine in ten published figures of fully described runs differ at most.
_ERROR_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class LargeTensor:
    """Storages of one kind, shape and dtype that are alive at the peak, such as one of each layer.

    Attributes:
        kind: their use.
        owner: the module that made them, with `*` for a layer's number where there are several; "" where none is known.
        operation: that made them, such as "aten.mm.default"; "" where none is known.
        shape: of each.
        dtype: its name.
        num_bytes: of each.
        count: how many there are.
    """

    kind: str
    owner: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The predicted memory of a training step.

    Attributes:
        peak_bytes: `torch.cuda.max_memory_allocated()`, in the allocator's blocks, cuBLAS's workspaces included.
        reserved_bytes: `torch.cuda.max_memory_reserved()` on a device that is never full, by a model of the allocator.
        phase: of the peak: forward, backward, optimizer, generation, or "between passes".
        step: of the peak, counted from 1.
        phases: the peak of each phase, bytes.
        breakdown: bytes at the peak, by use.
        top: the largest storages alive at the peak, equal ones together.
        host_bytes: the most that tensors hold in host memory, offloaded ones included.
        disk_bytes: the most that the file on the disk holds, with the passes that a plan is made from.
        disk_bytes_written: to that file in a step, or an update.
        confidence: "high"; "medium": with `assumptions` that may change memory; "low": with `unreached` parameters.
        assumptions: in words.
        unreached: trainable parameters without a gradient, so that part of the model may not have run.
        step_ms: time of the last step on `gpu`; None without one, as the other times.
        step_range_ms: range of nine in ten published steps with this prediction.
        phases_ms: time of each phase of the last step; empty without a card.
        stall_ms: time that compute would wait for copies in the last step.
        update_bytes_written, update_stall_ms: parts of `disk_bytes_written` and `stall_ms` outside of passes.
        trace: every change of device memory.
        storage_kinds: the use of each storage of `trace`, by its number.
        storage_makers: the module and the operation that made each, "" where none is known.
        streamed: of frozen weights that stream; None where none do.
        num_gpus: processes that train together; all figures are for one of them.
        notes: remarks on the options of the step.
    """

    peak_bytes: int
    reserved_bytes: int
    phase: str
    step: int
    phases: dict[str, int]
    breakdown: dict[str, int]
    top: tuple[LargeTensor, ...]
    host_bytes: int
    disk_bytes: int
    disk_bytes_written: int
    confidence: str
    assumptions: tuple[str, ...]
    unreached: tuple[str, ...]
    step_ms: float | None
    step_range_ms: tuple[float, float] | None
    phases_ms: dict[str, float]
    stall_ms: float | None
    trace: MemoryTrace = field(repr=False)
    storage_kinds: tuple[str, ...] = field(repr=False)
    storage_makers: tuple[tuple[str, str], ...] = field(repr=False)
    streamed: StreamedEstimate | None = None
    num_gpus: int = 1
    notes: tuple[str, ...] = ()
    update_bytes_written: int = 0
    update_stall_ms: float = 0.0

    def __str__(self) -> str:
        return self.text()

    def text(self, gpu: str | Card | None = None) -> str:
        """Return the words that `hf-memopt estimate` prints.

        Args:
            gpu: name or size of a card, as for `estimate_peak_memory`, to say also whether the step fits.

        Raises:
            ValueError: `gpu` is neither a known name nor a size.
        """
        card = None if gpu is None else find_card(gpu)
        blocks = [
            headlines(self, card),
            [f"Note: {note}" for note in self.notes],
            ["At the peak, GiB", *_rows(self.breakdown)],
            ["Most in each phase, GiB", *_rows(self.phases)],
            ["Largest tensors at the peak, MiB", *(f"  {line}" for line in top_table(self).lines())],
            list(_closing(self, card)),
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def uses_at(self, positions: Collection[int]) -> dict[int, dict[str, int]]:
        """Return the bytes of each use after the changes of the trace at these positions."""
        trace, held = self.trace, self.trace.held()
        uses: dict[int, dict[str, int]] = {}
        alive: Counter[str] = Counter()
        for position, (storage, change) in enumerate(zip(trace.storages, trace.changes, strict=True)):
            alive[self.storage_kinds[storage]] += change
            if position in positions:
                uses[position] = {**alive, UNUSED: held[position] - alive.total()}
        return uses

    def without_times(self) -> "MemoryEstimate":
        return replace(self, step_ms=None, step_range_ms=None, phases_ms={}, stall_ms=None)

    @property
    def disk_tb_per_day(self) -> float | None:
        """Return the terabytes (1e12 bytes) written in a day of such steps, or None without a time."""
        return self.disk_bytes_written / self.step_ms * _DAY_MS / 1e12 if self.step_ms else None

    def with_passes(self, times: float) -> "MemoryEstimate":
        """Return it for an update that has `times` as many forward and backward passes, with no other peak."""
        streamed = self.streamed and self.streamed.with_passes(times)
        num_bytes = self.update_bytes_written + times * (self.disk_bytes_written - self.update_bytes_written)
        written = replace(self, disk_bytes_written=round(num_bytes), streamed=streamed)
        if self.step_ms is None or self.step_range_ms is None or self.stall_ms is None:
            return written
        scaled = {phase: ms * (times if phase in (FORWARD, BACKWARD) else 1) for phase, ms in self.phases_ms.items()}
        step_ms, (low, high) = sum(scaled.values()), self.step_range_ms
        return replace(
            written,
            step_ms=step_ms,
            step_range_ms=(step_ms * low / self.step_ms, step_ms * high / self.step_ms),
            phases_ms=scaled,
            stall_ms=self.update_stall_ms + times * (self.stall_ms - self.update_stall_ms),
        )


class Verdict(StrEnum):
    FITS = "fits"
    ONLY_JUST = "fits only just"
    NO = "does not fit"


def headlines(estimate: MemoryEstimate, card: Card | None = None) -> list[str]:
    needs = f"The step needs {format_gib(needed_bytes(estimate, card))}."
    if card is not None:
        judged = verdict(estimate, card)
        needs = f"It {judged} on {card.name} ({format_gib(card.memory_bytes)}). {needs}"
        if judged is Verdict.ONLY_JUST:
            error = f"estimates err by up to {_ERROR_SHARE:.0%}, which decides."
            nccl = f"NCCL takes {_nccl_text(estimate)} more, and {error}"
            needs += f" {nccl if estimate.num_gpus > 1 else error.capitalize()}"
    where = {OPTIMIZER: "in the optimizer's update", OUTSIDE: OUTSIDE}.get(estimate.phase, f"in {estimate.phase}")
    lines = [needs, f"The peak, {format_gib(estimate.peak_bytes)} allocated, is {where}."]
    if estimate.phase == OPTIMIZER:
        lines.append(
            "The optimizer sets it, so that activation checkpointing and offloading cannot lower it; a fused "
            "optimizer, one with less state, one on the host, or fewer trainable parameters can."
        )
    return lines


def needed_bytes(estimate: MemoryEstimate, card: Card | None = None) -> int:
    """Return the device memory with which the step gets through, without that of NCCL."""
    return estimate.trace.smallest_capacity + sum(allowances(card).values())


def verdict(estimate: MemoryEstimate, card: Card) -> Verdict:
    """Return whether it fits; "only just" if an estimate's error, or the memory that NCCL may take, decides."""
    room = card.memory_bytes - needed_bytes(estimate, card)
    if room < 0:
        return Verdict.NO
    is_sure = room >= _ERROR_SHARE * estimate.trace.smallest_capacity + nccl_bytes(estimate.num_gpus)[1]
    return Verdict.FITS if is_sure else Verdict.ONLY_JUST


def top_table(estimate: MemoryEstimate) -> Table:
    heads = ["MiB", "", "for", "owner", "made by", "shape", "dtype"]
    rows: list[list[Cell]] = [
        [
            tensor.num_bytes / MIB,
            f"x {tensor.count}" if tensor.count > 1 else "",
            tensor.kind,
            tensor.owner or None,
            _maker(tensor),
            "x".join(map(str, tensor.shape)) or "1",
            tensor.dtype,
        ]
        for tensor in estimate.top
    ]
    return Table(heads, rows)


# In other words than torch's where these say little: dtypes change, and memory is only reserved.
_MAKERS = {"to_copy": "cast", "empty": "", "empty_like": "", "empty_strided": "", "new_empty": "", "clone": "copy"}


def _maker(tensor: LargeTensor) -> str | None:
    """Return the operation that made an activation or a temporary in a word; of other memory its use says all."""
    if tensor.kind not in (ACTIVATION, TEMPORARY):
        return None
    name = tensor.operation.removeprefix("aten.").partition(".")[0].strip("_")
    return _MAKERS.get(name, name) or None


def as_facts(estimate: MemoryEstimate) -> dict[str, str]:
    facts = {
        "allocated at the peak": format_gib(estimate.peak_bytes),
        "reserved with room to spare": format_gib(estimate.reserved_bytes),
        "kept on the host": format_gib(estimate.host_bytes),
        "confidence": _CONFIDENCE[estimate.confidence],
    }
    if estimate.disk_bytes:
        facts["kept on the disk"] = disk_text(estimate)
    if estimate.streamed:
        facts["streamed weights"] = str(estimate.streamed)
    if estimate.assumptions:
        facts["assumed"] = "; ".join(estimate.assumptions)
    return facts


def as_json(estimate: MemoryEstimate, card: Card | None = None) -> dict[str, Any]:
    left_out = ("trace", "storage_kinds", "top")
    found = {name: getattr(estimate, name) for name in estimate.__dataclass_fields__ if name not in left_out}
    found["top"] = [asdict(tensor) for tensor in estimate.top]
    found["streamed"] = asdict(estimate.streamed) if estimate.streamed else None
    found["allowances_bytes"] = allowances(card)
    found["needed_bytes"] = needed_bytes(estimate, card)
    found["nccl_bytes"] = nccl_bytes(estimate.num_gpus)
    found["disk_tb_per_day"] = estimate.disk_tb_per_day
    if card is not None:
        found["card"] = {"name": card.name, "memory_bytes": card.memory_bytes, "verdict": verdict(estimate, card)}
    return found


def _nccl_text(estimate: MemoryEstimate) -> str:
    least, most = (num_bytes / GIB for num_bytes in nccl_bytes(estimate.num_gpus))
    return f"{least:.1f} to {most:.1f} GiB"


def _needs_text(estimate: MemoryEstimate, card: Card | None) -> str:
    kept = ", ".join(f"{name} {num_bytes / MIB:.0f} MiB" for name, num_bytes in allowances(card).items())
    nccl = f" NCCL takes {_nccl_text(estimate)} beside that." if estimate.num_gpus > 1 else ""
    return (
        f"Needed: {format_gib(estimate.trace.smallest_capacity)} for the allocator and, assumed, {kept}.{nccl} With "
        f"room to spare the allocator would reserve {format_gib(estimate.reserved_bytes)}."
    )


def time_text(estimate: MemoryEstimate, card: Card | None) -> str:
    if estimate.step_ms is None or estimate.step_range_ms is None:
        raise ValueError(f"card={card and card.name!r}: the estimate knows no time; make it with this card")
    low, high = (format_ms(ms) for ms in estimate.step_range_ms)
    source = ""
    if card is not None:
        cards = f"cards of its family, {family}" if (family := family_of(card)) else "cards of other families"
        alone = ", without communication" if estimate.num_gpus > 1 else ""
        source = f": the range of nine in ten published steps on {cards}{alone}"
    return f"{format_ms(estimate.step_ms)} ({low} to {high}{source})"


def disk_text(estimate: MemoryEstimate) -> str:
    """Return the size of the file on the disk and the bytes written: drives are rated for some hundred TB."""
    per_day = estimate.disk_tb_per_day
    rate = "" if per_day is None else f", {per_day:.2f} TB per day at this rate"
    return f"{format_gib(estimate.disk_bytes)}; {format_gib(estimate.disk_bytes_written)} written in a step{rate}"


def _closing(estimate: MemoryEstimate, card: Card | None) -> Iterator[str]:
    yield _needs_text(estimate, card)
    yield f"Host memory of tensors, offloaded ones included: {format_gib(estimate.host_bytes)}"
    if estimate.disk_bytes:
        yield f"Disk: {disk_text(estimate)}"
    if estimate.streamed:
        yield f"Streamed weights: {estimate.streamed}"
    if estimate.step_ms is not None:
        stall = f", of it {format_ms(estimate.stall_ms)} waiting for copies" if estimate.stall_ms else ""
        yield f"Time of a step: {time_text(estimate, card)}{stall}"
    yield f"Confidence: {_CONFIDENCE[estimate.confidence]}"
    for assumption in estimate.assumptions:
        yield f"  assumed: {assumption}"
    if estimate.unreached:
        names = ", ".join(estimate.unreached[:_MAX_NAMES])
        yield f"  {len(estimate.unreached)} trainable parameters got no gradient: {names}"


def _rows(sizes: dict[str, int]) -> list[str]:
    rows = [[name, f"{num_bytes / GIB:.3f}"] for name, num_bytes in sizes.items()]
    return [f"  {line}" for line in align(rows, "<>")]
