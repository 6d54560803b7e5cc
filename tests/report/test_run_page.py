import base64
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folders import PNG, RUNS, causal_lm_run, demo_run, logged_run, offloaded_run, write_json

from hf_memopt.memory.logger import METRICS_FILE, append_metrics
from hf_memopt.report import read_run, tables, write_report
from hf_memopt.report.html_page import figures_of


class Page(HTMLParser):
    """A parser of a page that fails at an unclosed tag or at a reference outside of the page."""

    EMPTY = ("meta", "img", "source", "wbr", "br")

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
        if tag in ("td", "th"):
            self.rows[-1].append("")
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
            self.rows[-1][-1] += data


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
@pytest.mark.sweep(share=0.4)
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


def sections(html: str) -> list[Page]:
    return [Page(f"<section{part.split('</section>')[0]}</section>") for part in html.split("<section")[1:]]


def pictures(folder: Path, *names: str) -> list[bytes]:
    return [(folder / "out" / f"{name}.png").read_bytes() for name in names]


def test_counted_bytes_come_first_and_the_hosts_memory_after_all_of_them(tmp_path: Path) -> None:
    demo = demo_run(tmp_path)
    results = json.loads((demo / "results.json").read_text())
    write_json(demo / "results.json", {**results, "learning_curves": {"teacher": [[1, 2.0], [2, 1.0]]}})
    append_metrics(demo / "student" / METRICS_FILE, 1, {"memory/host_rss_gib": 1.0})
    phases = {"memory/teacher_host_rss_gib": 1.0, "memory/student_host_rss_gib": 1.5}
    append_metrics(demo / "student" / METRICS_FILE, 2, {"memory/host_rss_gib": 1.5, **phases})
    (demo / "figures").mkdir()
    (demo / "figures" / "sampled_paths.png").write_bytes(PNG + b"paths")
    html = write_report(read_run(demo), tmp_path / "out").read_text()
    counted, learning, policies, host, phases, *_ = sections(html)
    kinds, losses, timeline, by_phase = pictures(
        tmp_path, "memory_by_kind", "losses", "memory_over_time", "peak_by_phase"
    )
    assert counted.images[1:] == [kinds]  # after the figure for dark screens
    assert "as counted" in counted.text
    assert learning.images[1:] == [losses, PNG + b"paths"]
    assert "Teacher and student" in policies.text
    assert host.images[1:] == [timeline]
    assert phases.images[1:] == [by_phase]
    assert "Memory of the host by phase" in phases.text


def test_compared_modes_come_before_the_hosts_memory(tmp_path: Path) -> None:
    for step in (1, 2):
        append_metrics(causal_lm_run(tmp_path) / METRICS_FILE, step, {"memory/host_rss_gib": 1.5 * step})
    first, host, *_ = sections(write_report(read_run(tmp_path), tmp_path / "out").read_text())
    assert first.images[1:] == pictures(tmp_path, "modes")
    assert host.images[1:] == pictures(tmp_path, "memory_over_time")


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.sweep(share=0.5)
def test_a_devices_memory_over_time_comes_first_and_a_hosts_where_nothing_else_is_known(
    tmp_path: Path, on_device: bool
) -> None:
    run = logged_run(tmp_path)
    if on_device:
        demo_run(tmp_path)
    else:
        (run / METRICS_FILE).unlink()
        for step in (1, 2):
            append_metrics(run / METRICS_FILE, step, {"memory/host_rss_gib": 1.5 * step})
    first, *_ = sections(write_report(read_run(run), tmp_path / "out").read_text())
    assert first.images[1:] == pictures(tmp_path, "memory_over_time")


def test_the_outcome_is_the_first_line(tmp_path: Path) -> None:
    demo = demo_run(tmp_path)
    results = json.loads((demo / "results.json").read_text())
    teacher = {"num_steps": 10, "success_rate": 0.944, "latency_ms": 30.6}
    student = {"num_steps": 1, "success_rate": 0.92, "latency_ms": 6.2}
    write_json(demo / "results.json", {**results, "outcomes": {"teacher": teacher, "student": student}})
    line, *_ = tables.headlines(read_run(demo))
    assert line == "teacher: 94 % in 10 steps, 31 ms; student: 92 % in 1 step, 6 ms"
    for broken in ({"teacher": {"num_steps": 1}}, {"teacher": {**teacher, "latency_ms": "fast"}}, ["teacher"]):
        write_json(demo / "results.json", {**results, "outcomes": broken})
        with pytest.raises(ValueError, match="its outcomes is not num_steps, success_rate and latency_ms by policy"):
            read_run(demo)


def test_an_out_of_memory_report_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out_of_memory_rank0.txt").write_text("backward <phase>\n  40.00 MiB  saved & kept\n")
    page = Page(write_report(read_run(tmp_path), tmp_path / "out").read_text())
    assert "backward <phase>\n  40.00 MiB  saved & kept\n" in page.text
    assert page.images == []


def test_the_work_of_an_offloader_comes_first(tmp_path: Path) -> None:
    run = offloaded_run(logged_run(tmp_path))
    history = [{"step": step, "loss": 1.0 / step} for step in (1, 2)]
    write_json(run / "trainer_state.json", {"log_history": history})
    page = write_report(read_run(run), tmp_path / "out").read_text()
    offloading, weights, curves, *_ = sections(page)
    assert offloading.images[1:] == pictures(tmp_path, "saved_activations")
    assert "30.00 MiB moved to the host" in offloading.text
    assert "compute waited 3.2 ms" in offloading.text
    assert offloading.rows == [["saved by (MiB)", "kept", "offloaded"], ["model.layers.*.mlp", "1.00", "2.00"]]
    assert "base: 2.00 GiB streamed" in weights.text
    assert curves.images[1::2] == pictures(tmp_path, "memory_over_time", "losses")
    whole = Page(page).text
    assert "4.00 MiB if all were kept, 1.50 MiB measured with offloading (62% less)" in whole
    assert "9.50 GiB reserved" in whole
    assert "RECIPE" not in whole  # the script is none


def test_an_offloading_record_of_another_form_is_refused(tmp_path: Path) -> None:
    file = offloaded_run(tmp_path) / "offloading.json"
    written = json.loads(file.read_text())
    for broken in ("{", json.dumps({**written, "stats": {"bytes_kept": 1}}), json.dumps({"stats": None})):
        file.write_text(broken)
        with pytest.raises(ValueError, match=r"offloading.json is not as hf_memopt writes it .*; remove the file"):
            read_run(tmp_path)
