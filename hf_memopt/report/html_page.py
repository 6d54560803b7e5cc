"""Pages of HTML in one file each, made from the templates in `templates/`, and the one about a run with its figures.

Figures, for light and for dark pages, need matplotlib.
"""

import base64
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hf_memopt.report import tables
from hf_memopt.report.offloading import OffloadingRecord, in_words
from hf_memopt.report.runs import DEVICE_PEAK, LoggedPeak, Run, memory_column
from hf_memopt.units import GIB, format_bytes, unit_for

COLORS = ("#4c78a8", "#9d7bc4", "#b58863", "#e58b3d", "#d1495b", "#4fa36b", "#7f8c9b", "#c9a227")
# Words that name the same thing share a colour in every figure of the library.
_KINDS = {
    "#4c78a8": ("parameters", "weights", "student weights"),
    "#31507a": ("frozen parameters",),
    "#6f9bd1": ("streamed weights",),
    "#d1495b": ("teacher", "teacher weights"),
    "#9d7bc4": ("optimizer state",),
    "#2f8f87": ("communication buffers",),
    "#b58863": ("gradients",),
    "#a9c4e4": ("gathered weights",),
    "#e58b3d": ("activations", "saved activations", "saved"),
    "#4fa36b": ("shared prefix",),
    "#c9a227": ("buffers",),
    "#79b4d0": ("inputs",),
    "#7f8c9b": ("temporaries",),
    "#c3cad1": ("library workspaces",),
    "#e3d9c6": ("unused ends of blocks",),
}
KIND_COLORS = {kind: color for color, kinds in _KINDS.items() for kind in kinds}
_CURVES = {"teacher": KIND_COLORS["teacher"], "held out": COLORS[3]} | dict.fromkeys(("student", "training"), COLORS[0])
_UNKNOWN_KIND = "#5d6b3f"
_HOST = _TIME = COLORS[0]
_BAR = COLORS[3]
# Inches of a figure whose text can be read on a phone, which scales it to its width.
_NARROW = 5.2, 3.4
_COUNTED_BY = {"update": "updates", "step": "optimizer steps", "epoch": "epochs"}

Draw = Callable[[Any], None]
DrawTimeline = Callable[[Any, Sequence[Mapping[str, float]]], None]


def figures_of(run: Run) -> dict[str, Draw]:
    """Return, by file name, functions that draw a figure of `run` on an empty `matplotlib.figure.Figure`."""
    figures: dict[str, Draw] = {}
    if run.offloading is not None and run.offloading.over_pass.held:
        record = run.offloading
        figures["saved_activations"] = lambda figure: _draw_pass(figure, record)
    varying = {_draw_device: run.device_varies, _draw_host: run.varies("memory/host_rss_gib")}
    draws = [draw for draw, varies in varying.items() if varies]
    if draws:
        figures["memory_over_time"] = lambda figure: _draw_timeline(figure, run.timeline, draws)
    if run.losses:
        figures["losses"] = lambda figure: _draw_losses(figure, run.losses, _COUNTED_BY[run.losses_by])
    if run.phases_differ:
        figures["peak_by_phase"] = lambda figure: _draw_phases(figure, run.phases, run.counts_device)
    if run.holders:
        figures["memory_by_kind"] = lambda figure: _draw_holders(figure, run.holders)
    if len(run.modes) > 1:
        figures["modes"] = lambda figure: _draw_modes(figure, run.modes)
    return figures


def render(draw: Draw, *, dark: bool) -> bytes:
    """Return a figure as PNG, on the page's own background; a ValueError where matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError("the report needs matplotlib: pip install matplotlib") from error
    # Without pyplot: a report written inside a user's program leaves its backend and figures alone.
    with matplotlib.rc_context(_style(dark)):
        figure = Figure(layout="constrained")
        draw(figure)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=144)
    return png.getvalue()


def render_both(draw: Draw) -> dict[str, bytes]:
    return {"light": render(draw, dark=False), "dark": render(draw, dark=True)}


def _style(dark: bool) -> dict[str, Any]:
    ink, paper, grid = ("#d7dce2", "#1b1f24", "#3a424c") if dark else ("#24292f", "#ffffff", "#d9dee4")
    return {
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "axes.edgecolor": grid,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "axes.titlesize": 11,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "text.color": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "font.size": 9.5,
    }


def _draw_timeline(figure: Any, timeline: Sequence[Mapping[str, float]], draws: Sequence[DrawTimeline]) -> None:
    figure.set_size_inches(_NARROW[0], 1.2 + 2.2 * len(draws))
    rows = figure.subplots(len(draws), 1, sharex=True, squeeze=False)[:, 0]
    for axes, draw in zip(rows, draws, strict=True):
        draw(axes, timeline)
    rows[-1].set_xlabel("optimizer steps")
    figure.legend(loc="outside lower center", ncols=2)


def _draw_host(axes: Any, timeline: Sequence[Mapping[str, float]]) -> None:
    unit, per_gib = _unit(record["memory/host_rss_gib"] for record in timeline)
    for key, label, color in (
        ("memory/host_rss_gib", "resident memory of the process", _HOST),
        ("memory/pinned_gib", "of it pinned by torch", COLORS[3]),
    ):
        points = [(record["step"], per_gib * record[key]) for record in timeline if key in record]
        if any(height for _, height in points):
            axes.plot(*zip(*points, strict=True), ".-", color=color, label=label)
    axes.set(title="Memory of the host", ylabel=unit)
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])


def _draw_pass(figure: Any, record: OffloadingRecord) -> None:
    figure.set_size_inches(*_NARROW)
    axes = figure.subplots()
    over_pass = record.over_pass
    unit, size = unit_for(max(*over_pass.held, *over_pass.plain))
    plain, held = ([num_bytes / size for num_bytes in row] for row in (over_pass.plain, over_pass.held))
    places = range(len(held))
    axes.fill_between(places, plain, color=COLORS[6], alpha=0.25, linewidth=0, step="post", label="if all were kept")
    axes.fill_between(places, held, color=COLORS[3], linewidth=0, step="post", label="held on the device")
    stats = record.stats
    if stats is not None and stats.predicted_peak_gib is not None:
        predicted = f"predicted peak: {format_bytes(stats.predicted_peak_gib * GIB)}"
        axes.axhline(stats.predicted_peak_gib * GIB / size, color=COLORS[4], linestyle="--", label=predicted)
    axes.axvline(over_pass.num_forward, color=COLORS[6], linewidth=1)
    middles = {"forward": over_pass.num_forward / 2, "backward": (over_pass.num_forward + len(held) - 1) / 2}
    for name, middle in middles.items():
        axes.text(middle, 0.985, name, ha="center", va="top", transform=axes.get_xaxis_transform())
    axes.set(title="Saved activations over one step", ylabel=unit, xlabel="saves and uses")
    axes.set_ylim(0, 1.15 * max(plain + held))
    axes.margins(x=0)
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside lower center", ncols=2)


def _draw_losses(figure: Any, losses: Mapping[str, Sequence[tuple[float, float]]], unit: str) -> None:
    figure.set_size_inches(*_NARROW)
    axes = figure.subplots()
    for name, curve in losses.items():
        color = _CURVES.get(name, COLORS[6])
        axes.plot(*zip(*curve, strict=True), ".-", color=color, label=name)
    axes.set(title="Loss", xlabel=unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    values = [loss for curve in losses.values() for _, loss in curve]
    if 0 < 10 * min(values) < max(values):
        axes.set_yscale("log")
    figure.legend(loc="outside lower center", ncols=3)


def _draw_device(axes: Any, timeline: Sequence[Mapping[str, float]]) -> None:
    timeline = [record for record in timeline if DEVICE_PEAK in record]
    steps = [record["step"] for record in timeline]
    kinds = {
        "allocated": "held by tensors",
        "fragmentation": "reserved, not in use",
        "elsewhere": "outside of torch's allocator",
    }
    unit, per_gib = _unit(sum(record.get(f"memory/{kind}_gib", 0.0) for kind in kinds) for record in timeline)
    series = {kind: [per_gib * record.get(f"memory/{kind}_gib", math.nan) for record in timeline] for kind in kinds}
    axes.stackplot(steps, *series.values(), labels=list(kinds.values()), colors=(COLORS[3], COLORS[0], COLORS[6]))
    peaks = [per_gib * record[DEVICE_PEAK] for record in timeline]
    axes.plot(steps, peaks, "--", color=COLORS[4], label="most that tensors held so far")
    axes.set(title="Memory of the device, at each log", ylabel=unit)
    axes.margins(x=0.02)


def _draw_phases(figure: Any, phases: Sequence[LoggedPeak], on_device: bool) -> None:
    figure.set_size_inches(_NARROW[0], 1.4 + 0.36 * len(phases))
    axes = figure.subplots()
    names = [phase.name for phase in phases]
    color = _BAR if on_device else _HOST
    unit, per_gib = _unit(phase.at_most_gib for phase in phases)
    axes.barh(names, [per_gib * phase.at_most_gib for phase in phases], color=color, alpha=0.35, label="at most")
    axes.barh(names, [per_gib * phase.at_least_gib for phase in phases], color=color, label="at least")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    title = "Peak of the device's memory by phase" if on_device else "Host memory of the process at the ends of phases"
    axes.set(title=title, xlabel=unit)
    if any(phase.at_least_gib < phase.at_most_gib for phase in phases):
        figure.legend(loc="outside lower center", ncols=2)


def _draw_holders(figure: Any, holders: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
    phases = list(next(iter(holders.values())))
    kinds = list(dict.fromkeys(kind for by_phase in holders.values() for found in by_phase.values() for kind in found))
    figure.set_size_inches(_NARROW[0], 1.4 + 0.32 * len(phases) * len(holders))
    totals = [sum(found.values()) for by_phase in holders.values() for found in by_phase.values()]
    unit, size = unit_for(max(totals))
    row = figure.subplots(len(phases), 1, sharex=True, squeeze=False)[:, 0]
    for axes, phase in zip(row, phases, strict=True):
        left = [0.0] * len(holders)
        for kind in kinds:
            widths = [by_phase[phase].get(kind, 0) / size for by_phase in holders.values()]
            axes.barh(list(holders), widths, left=left, color=KIND_COLORS.get(kind, _UNKNOWN_KIND), label=kind)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_title(phase, loc="left")
    row[-1].set_xlabel(f"{unit} on the device")
    row[-1].set_xlim(0, 1.04 * max(totals) / size or 1)
    if kinds:
        handles, labels = row[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(kinds)))


def _draw_modes(figure: Any, modes: Sequence[Mapping[str, Any]]) -> None:
    figure.set_size_inches(_NARROW[0], 1.8 + 0.7 * len(modes))
    key, title = memory_column(modes)
    memory, speed = figure.subplots(2, 1)
    for axes, color, figures, heading, unit in (
        (memory, _BAR, [mode.get(key) or 0 for mode in modes], title, "MiB"),
        (speed, _TIME, [mode["step_ms"] or 0 for mode in modes], "Median time of an update", "ms"),
    ):
        bars = axes.barh([mode["mode"] for mode in modes], figures, color=color)
        axes.bar_label(bars, fmt="{:,.1f}", padding=4)
        axes.margins(x=0.18)
        axes.grid(visible=False, axis="y")
        axes.set(title=heading, xlabel=unit)
        axes.invert_yaxis()


def _unit(figures_gib: Iterable[float]) -> tuple[str, float]:
    """Return the unit for an axis, and how many of it a GiB has."""
    unit, size = unit_for(GIB * max(figures_gib))
    return unit, GIB / size


def render_page(template: str, title: str, facts: Mapping[str, str], headlines: list[str], **values: Any) -> str:
    """Return a whole page from a file in `templates/` that extends `page.html`; text among `values` is escaped."""
    environment = Environment(
        loader=PackageLoader("hf_memopt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return environment.get_template(template).render(title=title, facts=facts, headlines=headlines, **values)


def write_report(run: Run, output: Path) -> Path:
    """Write `report.html` and the figures as PNG files, over earlier ones, and return the page's path.

    Raises:
        ValueError: matplotlib is not installed, or `output` is a file.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output={str(output)!r} is a file; name a folder")
    pictures = {name: render_both(draw) for name, draw in figures_of(run).items()}
    page = render_page(
        "run.html",
        f"Memory and time of {run.name}",
        run.facts,
        tables.headlines(run),
        run=run,
        tables=tables,
        in_words=in_words,
        pictures=pictures,
    )
    output.mkdir(parents=True, exist_ok=True)
    for name, pngs in pictures.items():
        (output / f"{name}.png").write_bytes(pngs["light"])
    (output / "report.html").write_text(page, encoding="utf-8")
    return output / "report.html"
