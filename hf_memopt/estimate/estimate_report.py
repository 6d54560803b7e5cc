"""An estimate in words, as tables and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hf_memopt.estimate.accounting.allocation_log import OPTIMIZER
from hf_memopt.estimate.estimate import MemoryEstimate
from hf_memopt.estimate.gpus import Card, allowances
from hf_memopt.text_table import Table, align
from hf_memopt.units import GIB, MIB, format_gib

_MAX_NAMES = 5


def text(estimate: MemoryEstimate, card: Card | None = None) -> str:
    """What `hf-memopt estimate` prints: the phase of the peak first.

    Args:
        estimate: to describe.
        card: to say whether it fits.
    """
    blocks = [
        [*headlines(estimate), *_needed(estimate, card)],
        ["At the peak, GiB", *_rows(estimate.breakdown)],
        ["Most in each phase, GiB", *_rows(estimate.phases)],
        ["Largest tensors at the peak, MiB", *(f"  {line}" for line in top_table(estimate).lines())],
        list(_closing(estimate)),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def headlines(estimate: MemoryEstimate) -> list[str]:
    """The phase of the peak, and what that means."""
    lines = [
        f"The peak is in {_phase(estimate)}, in step {estimate.step}: {format_gib(estimate.peak_bytes)} of tensors; "
        f"the allocator then holds {format_gib(estimate.reserved_bytes)} (by a model of it)."
    ]
    if estimate.phase == OPTIMIZER:
        lines.append(
            "The optimizer sets it, so that activation checkpointing and offloading cannot lower it; a fused "
            "optimizer, one with less state, or fewer trainable parameters can."
        )
    return lines


def needed_bytes(estimate: MemoryEstimate, card: Card | None = None) -> int:
    """What a card must have: the allocator's memory and the allowances."""
    return estimate.reserved_bytes + sum(allowances(card).values())


def top_table(estimate: MemoryEstimate) -> Table:
    """The largest tensors at the peak."""
    heads = ["MiB", "for", "owner", "made by", "shape", "dtype"]
    rows = [
        [
            tensor.num_bytes / MIB,
            tensor.kind,
            tensor.owner or None,
            tensor.operation.removeprefix("aten.").removesuffix(".default") or None,
            "x".join(map(str, tensor.shape)) or "1",
            tensor.dtype,
        ]
        for tensor in estimate.top
    ]
    return Table(heads, [list(row) for row in rows])


def as_facts(estimate: MemoryEstimate) -> dict[str, str]:
    """Short facts, by name."""
    facts = {
        "peak of tensors": format_gib(estimate.peak_bytes),
        "held by the allocator": f"{format_gib(estimate.reserved_bytes)} (by a model of it)",
        "kept on the host": format_gib(estimate.host_bytes),
        "confidence": estimate.confidence,
    }
    if estimate.assumptions:
        facts["assumed"] = "; ".join(estimate.assumptions)
    return facts


def as_json(estimate: MemoryEstimate, card: Card | None = None) -> dict[str, Any]:
    """All but the trace; bytes as whole numbers.

    Args:
        estimate: to describe.
        card: to say whether it fits.
    """
    left_out = ("trace", "storage_kinds", "top")
    found = {name: getattr(estimate, name) for name in estimate.__dataclass_fields__ if name not in left_out}
    found["top"] = [asdict(tensor) for tensor in estimate.top]
    found["allowances_bytes"] = allowances(card)
    found["needed_bytes"] = needed_bytes(estimate, card)
    if card is not None:
        found["card"] = {"name": card.name, "memory_bytes": card.memory_bytes, "fits": _fits(estimate, card)}
    return found


def _needed(estimate: MemoryEstimate, card: Card | None) -> Iterator[str]:
    kept = ", ".join(f"{name} {num_bytes / MIB:.0f} MiB" for name, num_bytes in allowances(card).items())
    yield f"Besides tensors, assumed and not measured: {kept}. Altogether {format_gib(needed_bytes(estimate, card))}."
    if card is not None:
        verdict = "It fits" if _fits(estimate, card) else "It does not fit"
        yield f"{verdict} on {card.name} ({format_gib(card.memory_bytes)})."


def _fits(estimate: MemoryEstimate, card: Card) -> bool:
    return estimate.trace.fits(card.memory_bytes - sum(allowances(card).values()))


def _closing(estimate: MemoryEstimate) -> Iterator[str]:
    yield f"Host memory of tensors, offloaded ones included: {format_gib(estimate.host_bytes)}"
    if estimate.step_ms is not None:
        stall = f", of it {estimate.stall_ms:.0f} ms waiting for copies" if estimate.stall_ms else ""
        yield f"Time of a step, by a roofline (good for ratios): {estimate.step_ms:.0f} ms{stall}"
    yield f"Confidence: {estimate.confidence}"
    for assumption in estimate.assumptions:
        yield f"  assumed: {assumption}"
    if estimate.unreached:
        names = ", ".join(estimate.unreached[:_MAX_NAMES])
        yield f"  {len(estimate.unreached)} trainable parameters got no gradient, so part may not have run: {names}"


def _phase(estimate: MemoryEstimate) -> str:
    return "the optimizer's update" if estimate.phase == OPTIMIZER else estimate.phase


def _rows(sizes: dict[str, int]) -> list[str]:
    rows = [[name, f"{num_bytes / GIB:.3f}"] for name, num_bytes in sizes.items()]
    return [f"  {line}" for line in align(rows, "<>")]
