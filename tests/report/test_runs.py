"""The report of a run: what is read, what is drawn, and that the page stands alone."""

import base64
import json
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_allocator import FakeCounters
from matplotlib.figure import Figure

from hf_memopt.cli import main
from hf_memopt.memory import MemoryTracker
from hf_memopt.memory.logger import memory_metrics
from hf_memopt.memory.metrics_file import METRICS_FILE, append_metrics, read_metrics
from hf_memopt.report import read_run, tables, write_report
from hf_memopt.report.figures import figures_of, render
from hf_memopt.report.runs import PhasePeak, Run, phase_peaks

MIB, GIB = 2**20, 2**30
PNG = b"\x89PNG\r\n\x1a\n"
# As the reflow demo writes it.
HOLDERS = {
    "resident": {
        "teacher": {"weights": 2 * MIB, "teacher": 3 * MIB},
        "backward": {"weights": 2 * MIB, "saved": 6 * MIB},
    },
    "swapped": {
        "teacher": {"weights": 2 * MIB, "teacher": 3 * MIB},
        "backward": {"weights": 2 * MIB, "saved": 4 * MIB},
    },
}
EVALUATION = {
    "num_observations": 12,
    "teacher": {"error": {"1": 0.5, "10": 0.0}, "latency_ms": {"1": 7.0, "10": 30.0}},
    "student": {"error": {"1": 0.25, "2": 0.125}, "latency_ms": {"1": 7.5}},
}


def demo_run(folder: Path) -> Path:
    write_json(folder / "results.json", {"seed": 0, "memory_bytes": HOLDERS, "evaluation": EVALUATION})
    return folder


def causal_lm_run(folder: Path) -> Path:
    """As `train_causal_lm` leaves it behind, with the fields of its `Cost`."""
    costs: list[dict[str, Any]] = [
        {"mode": "off", "step_ms": 50.0, "peak_mib": None, "saved_mib": 100.0, "losses": [2.0, 1.0]},
        {
            "mode": "<all>",
            "step_ms": 75.0,
            "peak_mib": None,
            "saved_mib": 25.0,
            "moved_mib": 80.5,
            "losses": [2.0, 1.0],
        },
        {"mode": "auto", "step_ms": 60.0, "saved_mib": 50.0, "predicted_saved_mib": 50.0, "losses": [2.0, 1.5]},
    ]
    results = {
        "mode": "auto",
        "device": "cpu",
        "versions": {"torch": "2.11.0"},
        "history": [{"update": 1, "loss": 2.0}],
    }
    write_json(folder / "results.json", {**results, "training_cost": costs[2], "compared_costs": costs})
    (folder / "results.png").write_bytes(PNG + b"drawn by the recipe")
    return folder


def logged_run(folder: Path) -> Path:
    """Twenty steps under a tracker, every fifth logged; the peak is in backward, the others' are bounds."""
    counters = FakeCounters(total_bytes=80 * GIB)
    counters.elsewhere_bytes = GIB
    tracker = MemoryTracker(torch.device("cpu"), counters=counters)
    counters.move(4 * GIB)
    for step in range(1, 21):
        with tracker.phase("forward"):
            counters.move(2 * GIB)
        with tracker.phase("backward"):
            counters.move(3 * GIB)
            counters.move(-5 * GIB)
        tracker.step()
        if step % 5 == 0:
            append_metrics(folder / METRICS_FILE, step, memory_metrics(tracker, tracker.read()))
    return folder


RUNS = {"demo": demo_run, "causal_lm": causal_lm_run, "logged": logged_run}


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def test_metrics_come_back_with_the_later_of_two_lines_for_a_step(tmp_path: Path) -> None:
    file = tmp_path / "run" / METRICS_FILE
    for step, figure in ((1, 0.5), (2, 0.75), (3, 9.0), (2, 0.25)):
        append_metrics(file, step, {"memory/host_rss_gib": figure})
    found = [(record["step"], record["memory/host_rss_gib"]) for record in read_metrics(file)]
    assert found == [(1, 0.5), (2, 0.25), (3, 9.0)]
    with pytest.raises(ValueError, match="metrics have a key 'step'"):
        append_metrics(file, 4, {"step": 4})


@pytest.mark.parametrize("line", ['{"step": 2, "memory/al', '{"loss": 1.0}', "[1]", '{"step": null}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    append_metrics(tmp_path / METRICS_FILE, 1, {})
    with (tmp_path / METRICS_FILE).open("a") as lines:
        lines.write(line)
    with pytest.raises(ValueError, match=rf"{METRICS_FILE}, line 2, is no JSON object with a 'step'"):
        read_run(tmp_path)


def test_an_empty_folder_is_refused_with_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    for word in (
        "holds nothing to report",
        "memory.jsonl",
        "trainer_state.json",
        "MemoryLoggingCallback",
        "results.json",
    ):
        assert word in message
    assert list(tmp_path.iterdir()) == []
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("results", "complaint"),
    [
        ("{", "results.json is no JSON"),
        ("[]", "its whole is not an object"),
        ('{"memory_bytes": {"a": {}}}', "its memory_bytes is not bytes by design"),
        ('{"memory_bytes": {"a": 3}}', "its memory_bytes is not bytes by design"),
        ('{"memory_bytes": {"a": {"p": {"k": 1.5}}}}', "its memory_bytes is not bytes by design"),
        ('{"memory_bytes": {"a": {"p": {}}, "b": {"q": {}}}}', "its memory_bytes is not bytes by design"),
        ('{"compared_costs": [{"mode": "off"}]}', "its compared_costs or training_cost is not made of objects"),
        ('{"training_cost": 3}', "its compared_costs or training_cost is not made of objects"),
        ('{"compared_costs": 5}', "its compared_costs or training_cost is not made of objects"),
        ('{"training_cost": {"mode": "off", "step_ms": null}}', "step_ms above 0, and other figures"),
        ('{"training_cost": {"mode": "off", "step_ms": 0}}', "step_ms above 0, and other figures"),
        ('{"training_cost": {"mode": "off", "step_ms": 1, "saved_mib": "x"}}', "other figures that are numbers"),
        ('{"versions": [1]}', "its versions is not an object"),
        ('{"evaluation": {"teacher": {"error": {"1": 1.0}}}}', "its evaluation is not error and latency_ms"),
    ],
)
def test_results_of_another_form_are_refused(tmp_path: Path, results: str, complaint: str) -> None:
    logged_run(tmp_path)
    (tmp_path / "results.json").write_text(results)
    with pytest.raises(ValueError, match=complaint):
        read_run(tmp_path)


def test_figures_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 3, "memory/host_rss_gib": null}')
    with pytest.raises(ValueError, match="a memory figure of step 3 is no number; remove that record"):
        read_run(tmp_path)
    (tmp_path / METRICS_FILE).unlink()
    write_json(tmp_path / "trainer_state.json", {"log_history": [1]})
    with pytest.raises(ValueError, match="its log_history is not a list of objects"):
        read_run(tmp_path)


def test_designs_that_hold_nothing_have_no_share(tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", {"memory_bytes": {"a": {"p": {}}, "b": {"p": {}}}})
    assert "&ndash;" in write_report(read_run(tmp_path), tmp_path / "report").read_text()


def test_memory_by_epoch_is_no_memory_by_design(tmp_path: Path) -> None:
    logged_run(tmp_path)
    (tmp_path / "results.json").write_text('{"memory_bytes": [1, 2]}')
    assert read_run(tmp_path).holders == {}


def test_the_newest_checkpoint_of_a_trainer_is_read(tmp_path: Path) -> None:
    for step in (90, 100):
        history = [{"step": step, "loss": 1.0, "memory/host_rss_gib": 0.01 * step}, {"step": step, "eval_loss": 1.0}]
        write_json(tmp_path / f"checkpoint-{step}" / "trainer_state.json", {"log_history": history})
    run = read_run(tmp_path)
    assert [(record["step"], record["memory/host_rss_gib"]) for record in run.timeline] == [(100, 1.0)]
    append_metrics(tmp_path / METRICS_FILE, 7, {"memory/host_rss_gib": 2.0})  # is complete, so it comes first
    assert [record["step"] for record in read_run(tmp_path).timeline] == [7]


def test_a_trainer_without_memory_figures_has_nothing_to_report(tmp_path: Path) -> None:
    write_json(tmp_path / "trainer_state.json", {"log_history": [{"step": 1, "loss": 1.0}]})
    with pytest.raises(ValueError, match="holds nothing to report"):
        read_run(tmp_path)


def test_phases_are_exact_or_bounds(tmp_path: Path) -> None:
    run = read_run(logged_run(tmp_path))
    assert run.phases == [PhasePeak("forward", 6.0, 9.0), PhasePeak("backward", 9.0, 9.0)]
    assert tables.headlines(run) == ["The most that tensors held on the device: 9.00 GiB, in the phase “backward”."]
    assert phase_peaks(
        {"memory/host_rss_gib": 3.0, "memory/forward_host_rss_gib": 2.0, "memory/allocated_gib": 1.0}
    ) == [PhasePeak("forward", 2.0, 2.0)]


def test_modes_are_compared_with_the_first(tmp_path: Path) -> None:
    run = read_run(causal_lm_run(tmp_path))
    table = tables.mode_table(run.modes)
    assert table.heads == ["mode", "saved MiB", "predicted MiB", "moved MiB/step", "step ms", "losses"]
    assert table.rows == [
        ["off", 100.0, None, None, 50.0, "reference"],
        ["<all>", 25.0, None, 80.5, 75.0, "bitwise equal"],
        ["auto", 50.0, 50.0, None, 60.0, "1 of 2 equal"],
    ]
    assert tables.headlines(run) == [
        "Saved activations on the device at the peak: 100.0 MiB in mode off, 25.0 MiB in mode <all> (0.25 of it)."
    ]
    run.facts["device"] = "Some GPU"
    run.modes[0]["peak_mib"], run.modes[2]["peak_mib"] = 400.0, 300.0
    assert tables.headlines(run) == [
        "Peak of the device's memory: 400.0 MiB in mode off, 300.0 MiB in mode auto (0.75 of it), "
        "in 1.20 times the time."
    ]


def test_designs_are_compared_with_the_first(tmp_path: Path) -> None:
    run = read_run(demo_run(tmp_path))
    assert tables.holder_table(run).rows == [["resident", 5.0, 8.0, 8.0, 1.0], ["swapped", 5.0, 6.0, 6.0, 0.75]]
    assert tables.policy_table(run).rows == [
        ["teacher", 1, 0.5, 7.0],
        ["teacher", 10, 0.0, 30.0],
        ["student", 1, 0.25, 7.5],
        ["student", 2, 0.125, None],
    ]


@pytest.mark.parametrize(
    ("make", "lacking"),
    [
        (demo_run, ["over time", "time of each design"]),
        (causal_lm_run, ["over time"]),
        (logged_run, ["compared modes"]),
    ],
)
def test_what_a_folder_lacks_is_said(tmp_path: Path, make: Callable[[Path], Path], lacking: list[str]) -> None:
    found = read_run(make(tmp_path)).lacking
    assert len(found) == len(lacking)
    assert all(words in line for words, line in zip(lacking, found, strict=True))


def test_figures_without_phases_are_told_how_to_name_them(tmp_path: Path) -> None:
    append_metrics(tmp_path / METRICS_FILE, 1, {"memory/host_rss_gib": 1.5})
    run = read_run(tmp_path)
    assert "name no phase" in run.lacking[0]
    assert list(figures_of(run)) == ["memory_over_time"]


def test_a_run_of_one_mode_is_told_how_to_compare(tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", {"training_cost": {"mode": "auto", "step_ms": 3.0}, "compared_costs": []})
    run = read_run(tmp_path)
    assert "--compare off,all,auto" in run.lacking[1]
    assert tables.headlines(run) == []
    assert tables.mode_table(run.modes).heads == ["mode", "step ms"]


def drawn(run: Run, name: str) -> Figure:
    figure = Figure()
    figures_of(run)[name](figure)
    return figure


def test_bars_are_as_long_as_the_figures(tmp_path: Path) -> None:
    figure = drawn(read_run(demo_run(tmp_path)), "memory_by_kind")
    lengths = [sum(bar.get_width() for bar in axes.patches) for axes in figure.axes]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["teacher", "backward"]
    assert lengths == [5.0 + 5.0, 8.0 + 6.0]
    ends = [max(bar.get_x() + bar.get_width() for bar in axes.patches) for axes in figure.axes]
    assert ends == [5.0, 8.0]  # side by side


def test_bars_of_modes_and_phases(tmp_path: Path) -> None:
    memory, speed = drawn(read_run(causal_lm_run(tmp_path)), "modes").axes
    assert [bar.get_width() for bar in memory.patches] == [100.0, 25.0, 50.0]
    assert [bar.get_width() for bar in speed.patches] == [50.0, 75.0, 60.0]
    (phases,) = drawn(read_run(logged_run(tmp_path)), "peak_by_phase").axes
    assert [bar.get_width() for bar in phases.patches] == [9.0, 9.0, 6.0, 9.0]


def test_the_timeline_stacks_what_the_device_holds(tmp_path: Path) -> None:
    device, host = drawn(read_run(logged_run(tmp_path)), "memory_over_time").axes
    tops = [max(area.get_paths()[0].vertices[:, 1]) for area in device.collections]
    assert tops == [4.0, 9.0, 10.0]  # allocated, and reserved, and elsewhere
    assert list(device.lines[0].get_ydata()) == [9.0] * 4
    assert list(host.lines[0].get_xdata()) == [5, 10, 15, 20]


def test_a_timeline_of_the_host_alone(tmp_path: Path) -> None:
    append_metrics(tmp_path / METRICS_FILE, 1, {"memory/host_rss_gib": 1.5, "memory/my phase_host_rss_gib": 1.25})
    run = read_run(tmp_path)
    (host,) = drawn(run, "memory_over_time").axes
    assert list(host.lines[0].get_ydata()) == [1.5]
    assert run.phases == [PhasePeak("my phase", 1.25, 1.25)]
    assert drawn(run, "peak_by_phase").axes[0].get_title() == "Host memory of the process at the ends of phases"


class Page(HTMLParser):
    """Reads a page, and fails where its tags do not close or something lies outside of it."""

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
    assert all(line in page.text for line in (*run.lacking, *tables.headlines(run)))


def test_the_page_shows_the_table(tmp_path: Path) -> None:
    run = read_run(causal_lm_run(tmp_path))
    page = Page(write_report(run, tmp_path / "out").read_text())
    dash = "–"  # noqa: RUF001
    assert page.rows == [
        ["mode", "saved MiB", "predicted MiB", "moved MiB/step", "step ms", "losses"],
        ["off", "100.0", dash, dash, "50.0", "reference"],
        ["<all>", "25.0", dash, "80.5", "75.0", "bitwise equal"],
        ["auto", "50.0", "50.0", dash, "60.0", "1 of 2 equal"],
    ]
    assert "its times say nothing about a GPU" in page.text
    assert (tmp_path / "results.png").read_bytes() in page.images  # the run's own figure


def test_an_out_of_memory_report_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out_of_memory_rank0.txt").write_text("backward <phase>\n  40.00 MiB  saved & kept\n")
    page = Page(write_report(read_run(tmp_path), tmp_path / "out").read_text())
    assert "backward <phase>\n  40.00 MiB  saved & kept\n" in page.text
    assert page.images == []


def test_light_and_dark_figures_differ(tmp_path: Path) -> None:
    draw = figures_of(read_run(demo_run(tmp_path)))["memory_by_kind"]
    light, dark = render(draw, dark=False), render(draw, dark=True)
    assert light != dark
    assert render(draw, dark=False) == light


def test_without_matplotlib_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_run(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(tmp_path)]) == 2
    assert 'pip install "hf_memopt[report]"' in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    assert main(["report", str(tmp_path), "--json"]) == 0  # needs no figures


def test_the_command_writes_or_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"report: {tmp_path / 'report' / 'report.html'}\n" in printed
    assert "not in the report: memory over time" in printed
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holders"] == HOLDERS
    assert main(["report", str(tmp_path), "--json", "--output", str(tmp_path / "elsewhere")]) == 2
    assert "not allowed with argument --json" in capsys.readouterr().err
    (tmp_path / "file").write_text("precious")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "precious"
