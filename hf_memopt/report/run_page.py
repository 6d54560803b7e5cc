"""A run's report as one HTML file, with its figures as PNG files beside it."""

from pathlib import Path

from hf_memopt.report import tables
from hf_memopt.report.figures import figures_of, render_both
from hf_memopt.report.html_page import render_page
from hf_memopt.report.runs import Run


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
        pictures=pictures,
    )
    output.mkdir(parents=True, exist_ok=True)
    for name, pngs in pictures.items():
        (output / f"{name}.png").write_bytes(pngs["light"])
    (output / "report.html").write_text(page, encoding="utf-8")
    return output / "report.html"
