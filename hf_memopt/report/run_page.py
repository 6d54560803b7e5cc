"""A report as one HTML file that needs nothing beside it: figures are inside, for light and for dark screens."""

import base64
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path

from hf_memopt.report import tables
from hf_memopt.report.figures import figures_of, render
from hf_memopt.report.runs import Run
from hf_memopt.text_table import Cell, Table

_ON_CPU = (
    "The device is a CPU: it holds the copies in the same memory, so that nothing was saved, and its times say nothing "
    "about a GPU."
)
_MODES = (
    "saved: saved activations on the device at the peak, by the offloader's own count (storages above its threshold). "
    "predicted: by the plan of mode “auto”. step: median time of an update. stall: time per update for which compute "
    "waited for copies. pass: the newest forward and backward. losses: of all compared updates, against the first mode."
)
_COUNTED = "Counted bytes, by what they are used for. Temporaries within an operation are not among them."
_PHASES = (
    "As of the last logged step. Where the process's peak counter is shared with others, a phase's peak is "
    "known to lie between two figures; reset_peaks=True makes it exact."
)
_ALT = {
    "memory_over_time": "Memory of device and host at each logged step",
    "peak_by_phase": "Peak memory by phase of a training step",
    "memory_by_kind": "Memory on the device by design, phase and kind",
    "modes": "Memory and time by mode",
}


def write_report(run: Run, output: Path) -> Path:
    """Write `report.html` and the figures as PNG files; returns the page's path. Earlier ones are replaced.

    Raises:
        ValueError: matplotlib is not installed, or `output` is a file.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output={str(output)!r} is a file; name a folder")
    drawn = {name: (render(draw, dark=False), render(draw, dark=True)) for name, draw in figures_of(run).items()}
    pictures = {name: picture(_ALT[name], *pngs) for name, pngs in drawn.items()}
    opening = facts_and_headlines(run.facts, tables.headlines(run))
    parts = [opening, *_sections(run, pictures), *_appendix(run)]
    page = document(f"Memory and time of {run.name}", parts)
    output.mkdir(parents=True, exist_ok=True)
    for name, (light, _) in drawn.items():
        (output / f"{name}.png").write_bytes(light)
    (output / "report.html").write_text(page, encoding="utf-8")
    return output / "report.html"


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page: the title as text, the parts as HTML."""
    style = (files("hf_memopt.report") / "report.css").read_text(encoding="utf-8")
    title = escape(title)
    body = "\n".join([f"<h1>{title}</h1>", *parts])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def facts_and_headlines(facts: Mapping[str, str], headlines: Iterable[str]) -> str:
    """What a page begins with."""
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items())
    lines = "".join(f"<p class=headline>{escape(line)}</p>" for line in headlines)
    return f"<dl>{terms}</dl>{lines}"


def _sections(run: Run, pictures: dict[str, str]) -> Iterator[str]:
    if run.modes:
        note = f"{_MODES} {_ON_CPU}" if run.facts.get("device") == "cpu" else _MODES
        yield section("Memory and time by mode", pictures["modes"], table_html(tables.mode_table(run.modes)), note)
    if run.holders:
        by_kind = pictures["memory_by_kind"]
        yield section("Memory by kind", table_html(tables.holder_table(run)), by_kind, _COUNTED)
    if run.timeline:
        yield section("Memory over time", pictures["memory_over_time"], "", "")
    if run.phases:
        yield section("Peak by phase", pictures["peak_by_phase"], table_html(tables.phase_table(run)), _PHASES)
    if run.policies:
        yield section("Teacher and student", table_html(tables.policy_table(run)), "", "")


def _appendix(run: Run) -> Iterator[str]:
    for name, text in run.oom_reports.items():
        yield section(f"Out of memory: {name}", f"<pre>{escape(text)}</pre>", "", "")
    if run.lacking:
        items = "".join(f"<li>{escape(lacking)}</li>" for lacking in run.lacking)
        yield f"<section class=lacking><h2>Not in this report</h2><ul>{items}</ul></section>"
    if run.figures:
        images = "".join(
            f'<img alt="{escape(file.stem)}" src="{_data_uri(file.read_bytes())}">' for file in run.figures
        )
        yield f"<details><summary>Figures that the run drew itself</summary>{images}</details>"


def section(title: str, first: str, second: str, note: str) -> str:
    """A titled box with two pieces of HTML and a note in plain text, each of which may be empty."""
    noted = f"<p class=note>{escape(note)}</p>" if note else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{first}\n{second}\n{noted}\n</section>"


def table_html(table: Table) -> str:
    """A table, numbers to the right."""
    # A column is aligned as its first cell with a value is.
    numeric = [any(isinstance(row[i], int | float) for row in table.rows) for i in range(len(table.heads))]
    classes = ["" if is_numeric is False else " class=number" for is_numeric in numeric]
    head = "".join(f"<th{c}>{escape(text)}</th>" for c, text in zip(classes, table.heads, strict=True))
    rows = "\n".join(
        "<tr>"
        + "".join(f"<td{c}>{_text(cell, table.digits)}</td>" for c, cell in zip(classes, row, strict=True))
        + "</tr>"
        for row in table.rows
    )
    return f"<div class=wide><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"


def _text(cell: Cell, digits: int) -> str:
    if cell is None:
        return "&ndash;"
    return f"{cell:,.{digits}f}" if isinstance(cell, float) else escape(str(cell))


def picture(alt: str, light: bytes, dark: bytes) -> str:
    """A figure inside the page, as two PNG files."""
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{_data_uri(dark)}">'
    return f'<picture>{source}<img alt="{escape(alt)}" src="{_data_uri(light)}"></picture>'


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
