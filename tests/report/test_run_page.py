import base64
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folders import PNG, RUNS, causal_lm_run, demo_run, write_json

from hf_memopt.memory.metrics_file import METRICS_FILE, append_metrics
from hf_memopt.report import read_run, tables, write_report
from hf_memopt.report.figures import figures_of


class Page(HTMLParser):
    """A parser of a page that fails at an unclosed tag or at a reference outside of the page."""

    EMPTY = ("meta", "img", "source")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.images: list[bytes] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe")
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        for name, value in attributes:
            if name in ("src", "srcset", "href"):
                assert value is not None
                kind, _, content = value.partition(",")
                assert kind == "data:image/png;base64"
                self.images.append(base64.b64decode(content, validate=True))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_the_page_stands_alone(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    run = read_run(make(tmp_path / "run"))
    file = write_report(run, tmp_path / "out")
    html = file.read_text()
    page = Page(html)
    assert "://" not in html
    assert "@import" not in html
    assert all(image.startswith(PNG) for image in page.images)
    files = sorted(file.parent.glob("*.png"))
    assert [png.stem for png in files] == sorted(figures_of(run))
    assert all(png.read_bytes() in page.images for png in files)
    assert all(line in page.text for line in (*run.missing, *tables.headlines(run)))


def test_the_page_shows_the_table(tmp_path: Path) -> None:
    run = read_run(causal_lm_run(tmp_path))
    page = Page(write_report(run, tmp_path / "out").read_text())
    assert page.rows == [
        ["mode", "saved MiB", "predicted MiB", "moved MiB/step", "step ms", "compared"],
        ["off", "100.0", "-", "-", "50.0", "reference"],
        ["<all>", "25.0", "-", "80.5", "75.0", "equal, bit for bit"],
        ["auto", "50.0", "50.0", "-", "60.0", "different, not by rounding"],
    ]
    assert "The device is a CPU" in page.text
    assert (tmp_path / "results.png").read_bytes() in page.images  # the run's own figure


def test_memory_losses_and_what_the_model_makes_come_first(tmp_path: Path) -> None:
    demo = demo_run(tmp_path)
    results = json.loads((demo / "results.json").read_text())
    write_json(demo / "results.json", {**results, "learning_curves": {"teacher": [[1, 2.0], [2, 1.0]]}})
    append_metrics(demo / "student" / METRICS_FILE, 1, {"memory/host_rss_gib": 1.5})
    (demo / "figures").mkdir()
    (demo / "figures" / "sampled_paths.png").write_bytes(PNG + b"paths")
    html = write_report(read_run(demo), tmp_path / "out").read_text()
    first = Page(html[html.index('<section class="first">') : html.index("</section>") + len("</section>")])
    written = [(tmp_path / "out" / f"{name}.png").read_bytes() for name in ("memory_over_time", "losses")]
    assert first.images[1] == written[0]  # after the figure for dark screens
    assert first.images[3] == written[1]
    assert first.images[4] == PNG + b"paths"
    assert html.index("<section") == html.index('<section class="first">')


def test_an_out_of_memory_report_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out_of_memory_rank0.txt").write_text("backward <phase>\n  40.00 MiB  saved & kept\n")
    page = Page(write_report(read_run(tmp_path), tmp_path / "out").read_text())
    assert "backward <phase>\n  40.00 MiB  saved & kept\n" in page.text
    assert page.images == []
