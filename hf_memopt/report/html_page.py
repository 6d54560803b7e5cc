"""Pages of HTML that need nothing beside them, made from the templates in `templates/`, and the one about a run."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hf_memopt.report import tables
from hf_memopt.report.figures import figures_of, render_both
from hf_memopt.report.offloading import in_words
from hf_memopt.report.runs import Run


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
