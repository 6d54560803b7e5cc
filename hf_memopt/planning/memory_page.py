"""A step's device memory over time, as one HTML page that needs no network."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from hf_memopt.command_line import check_output_file
from hf_memopt.planning.accounting.categories import CATEGORIES
from hf_memopt.planning.estimate_report import MemoryEstimate, as_facts, headlines, top_table
from hf_memopt.report.html_page import COLORS, KIND_COLORS, render_both, render_page
from hf_memopt.report.offloading import highest
from hf_memopt.units import MIB

_MAX_POINTS = 1500
_SHADES = {"forward": 0.0, "backward": 0.10, "optimizer": 0.22, "between passes": 0.05}


class Span(NamedTuple):
    phase: str
    start: int
    end: int


class MemoryTimeline(NamedTuple):
    positions: list[int]
    bytes_by_kind: dict[str, list[int]]
    spans: list[Span]


def timeline(estimate: MemoryEstimate, max_points: int = _MAX_POINTS) -> MemoryTimeline:
    """Return at most `max_points` positions from the first step on.

    Of each stretch it is the one that holds most, so that the peak is among them.
    """
    trace = estimate.trace
    positions = highest(trace.held(), max_points, trace.first_step)
    rows = list(estimate.uses_at(set(positions)).values())
    by_kind = {kind: [row.get(kind, 0) for row in rows] for kind in CATEGORIES}
    shown = {kind: series for kind, series in by_kind.items() if any(series)}
    return MemoryTimeline(positions, shown, list(_spans(trace.phases, trace.first_step)))


def write_timeline(estimate: MemoryEstimate, name: str, path: Path) -> Path:
    check_output_file("timeline", path)
    shown = timeline(estimate)
    page = render_page(
        "estimate.html",
        f"Estimated memory of {name}",
        as_facts(estimate),
        headlines(estimate),
        pngs=render_both(lambda figure: _draw(figure, shown, estimate)),
        largest=top_table(estimate),
    )
    path.write_text(page, encoding="utf-8")
    return path


def _spans(phases: tuple[str, ...], first: int) -> Iterator[Span]:
    for phase, positions in groupby(range(first, len(phases)), key=phases.__getitem__):
        stretch = list(positions)
        yield Span(phase, stretch[0], stretch[-1] + 1)


def _draw(figure: Any, shown: MemoryTimeline, estimate: MemoryEstimate) -> None:
    figure.set_size_inches(9, 4.6)
    axes = figure.subplots()
    series = [[num_bytes / MIB for num_bytes in row] for row in shown.bytes_by_kind.values()]
    colors = [KIND_COLORS[kind] for kind in shown.bytes_by_kind]
    axes.stackplot(shown.positions, *series, labels=list(shown.bytes_by_kind), colors=colors, step="post")
    peak_bytes, peak_at = estimate.trace.peak()
    axes.plot([peak_at], [peak_bytes / MIB], "v", color=COLORS[4], label=f"peak: {peak_bytes / MIB:,.1f} MiB")
    whole = shown.spans[-1].end - shown.spans[0].start
    for span in shown.spans:
        axes.axvspan(span.start, span.end, color=COLORS[6], alpha=_SHADES.get(span.phase, 0.0), linewidth=0, zorder=0)
        if span.end - span.start > 0.04 * whole:
            middle = (span.start + span.end) / 2
            axes.text(middle, 0.985, span.phase, ha="center", va="top", transform=axes.get_xaxis_transform())
    axes.set(ylabel="MiB of tensors", xlabel="allocations and releases", ylim=(0, 1.12 * peak_bytes / MIB))
    axes.margins(x=0)
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside lower center", ncols=5)
