from pathlib import Path
from typing import Any

from run_folders import causal_lm_run, demo_run, logged_run, offloaded_run, write_json

from hf_memopt.memory.logger import METRICS_FILE, append_metrics
from hf_memopt.planning.accounting.categories import CATEGORIES
from hf_memopt.report import read_run
from hf_memopt.report.html_page import KIND_COLORS, figures_of, render
from hf_memopt.report.runs import LoggedPeak, Run
from hf_memopt.report.tables import headlines


def drawn(run: Run, name: str) -> Any:
    from matplotlib.figure import Figure

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
    (device,) = drawn(read_run(logged_run(tmp_path)), "memory_over_time").axes  # the host's hardly varies
    tops = [max(area.get_paths()[0].vertices[:, 1]) for area in device.collections]
    assert tops == [4.0, 9.0, 10.0]  # allocated, reserved, and other processes' bytes
    assert list(device.lines[0].get_ydata()) == [8.0, 9.0, 9.0, 9.0]
    assert list(device.lines[0].get_xdata()) == [5, 10, 15, 20]


def test_a_timeline_of_the_host_alone(tmp_path: Path) -> None:
    phases = {"memory/my phase_host_rss_gib": 0.25, "memory/other_host_rss_gib": 0.5}
    append_metrics(tmp_path / METRICS_FILE, 1, {"memory/host_rss_gib": 0.25})
    append_metrics(tmp_path / METRICS_FILE, 2, {"memory/host_rss_gib": 0.5, **phases})
    run = read_run(tmp_path)
    (host,) = drawn(run, "memory_over_time").axes
    assert list(host.lines[0].get_ydata()) == [256.0, 512.0]
    assert host.get_ylabel() == "MiB"
    assert run.phases == [LoggedPeak("my phase", 0.25, 0.25), LoggedPeak("other", 0.5, 0.5)]
    (bars,) = drawn(run, "peak_by_phase").axes
    assert bars.get_title() == "Host memory of the process at the ends of phases"
    assert bars.get_xlabel() == "MiB"


def test_what_hardly_changes_is_not_drawn(tmp_path: Path) -> None:
    phases = {"memory/forward_host_rss_gib": 1.5, "memory/backward_host_rss_gib": 1.52}
    for step in (1, 2, 3):
        append_metrics(tmp_path / METRICS_FILE, step, {"memory/host_rss_gib": 1.5 + 0.02 * step, **phases})
    run = read_run(tmp_path)
    assert figures_of(run) == {}
    assert headlines(run) == ["The most host memory that the process held at a logged step: 1.56 GiB."]


def test_saved_activations_of_a_step_beside_those_of_plain_training(tmp_path: Path) -> None:
    figure = drawn(read_run(offloaded_run(tmp_path)), "saved_activations")
    (axes,) = figure.axes
    plain, held = (max(area.get_paths()[0].vertices[:, 1]) for area in axes.collections)
    assert (plain, held) == (4.0, 1.5)
    assert axes.get_ylabel() == "MiB"
    predicted, boundary = axes.lines
    assert predicted.get_ydata()[0] == 1.5
    assert boundary.get_xdata()[0] == 2
    assert [text.get_text() for text in axes.texts] == ["forward", "backward"]


def test_losses_of_a_trainer_are_shown_by_optimizer_steps(tmp_path: Path) -> None:
    history = [{"epoch": 0.1 * step, "step": step, "loss": 1.0 / step} for step in (2, 4)]
    write_json(offloaded_run(tmp_path) / "trainer_state.json", {"log_history": history})
    (axes,) = drawn(read_run(tmp_path), "losses").axes
    assert list(axes.lines[0].get_xdata()) == [2.0, 4.0]
    assert axes.get_xlabel() == "optimizer steps"


def test_light_and_dark_figures_differ(tmp_path: Path) -> None:
    draw = figures_of(read_run(demo_run(tmp_path)))["memory_by_kind"]
    light, dark = render(draw, dark=False), render(draw, dark=True)
    assert light != dark
    assert render(draw, dark=False) == light


def test_losses_of_a_demo_and_of_a_recipe(tmp_path: Path) -> None:
    demo = demo_run(tmp_path)
    write_json(demo / "results.json", {"learning_curves": {"teacher": [[1, 2.0], [2, 1.0]], "student": [[1, 3.0]]}})
    append_metrics(demo / "student" / METRICS_FILE, 1, {"memory/host_rss_gib": 1.5})
    run = read_run(demo)
    assert run.losses == {"teacher": [(1.0, 2.0), (2.0, 1.0)], "student": [(1.0, 3.0)]}
    assert run.timeline[0]["memory/host_rss_gib"] == 1.5  # of the student's own log
    (axes,) = drawn(run, "losses").axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[2.0, 1.0], [3.0]]
    history = [{"update": 1, "loss": 2.0}, {"update": 2, "loss": 1.0, "eval_loss": 1.5}]
    write_json(demo / "results.json", {"history": history})
    assert read_run(demo).losses == {"training": [(1.0, 2.0), (2.0, 1.0)]}
    assert drawn(read_run(demo), "losses").axes[0].get_xlabel() == "updates"
    write_json(demo / "results.json", {"history": [{"step": 1, "l1": 2.0}, {"step": 2, "l1": 1.0}]})
    assert read_run(demo).losses == {"reconstruction (L1)": [(1.0, 2.0), (2.0, 1.0)]}


def test_each_kind_of_memory_has_a_colour_of_its_own() -> None:
    colors = [KIND_COLORS[kind] for kind in CATEGORIES]
    assert len(set(colors)) == len(CATEGORIES)
    assert KIND_COLORS["saved activations"] == KIND_COLORS["activations"]
