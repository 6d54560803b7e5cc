from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import causal_lm_run, demo_run, logged_run, write_json

from hf_memopt.memory.logger import METRICS_FILE, append_metrics
from hf_memopt.report import read_run, tables
from hf_memopt.report.html_page import figures_of
from hf_memopt.report.runs import LoggedPeak, phase_peaks


@pytest.mark.parametrize(
    ("results", "complaint"),
    [
        ("{", "results.json is not JSON"),
        ("[]", "its whole is not an object"),
        ('{"memory_bytes": {"a": {}}}', "its memory_bytes is not bytes by design"),
        ('{"memory_bytes": {"a": 3}}', "its memory_bytes is not bytes by design"),
        ('{"memory_bytes": {"a": {"p": {"k": 1.5}}}}', "its memory_bytes is not bytes by design"),
        ('{"memory_bytes": {"a": {"p": {}}, "b": {"q": {}}}}', "its memory_bytes is not bytes by design"),
        ('{"training_cost": 3}', "its training_cost is not made of objects"),
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
    with pytest.raises(ValueError, match="a memory figure of step 3 is not a number; remove that record"):
        read_run(tmp_path)
    (tmp_path / METRICS_FILE).unlink()
    write_json(tmp_path / "trainer_state.json", {"log_history": [1]})
    with pytest.raises(ValueError, match="its log_history is not a list of objects"):
        read_run(tmp_path)


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
    append_metrics(tmp_path / METRICS_FILE, 7, {"memory/host_rss_gib": 2.0})  # the complete file takes precedence
    assert [record["step"] for record in read_run(tmp_path).timeline] == [7]


def test_a_trainer_without_memory_figures_has_nothing_to_report(tmp_path: Path) -> None:
    write_json(tmp_path / "trainer_state.json", {"log_history": [{"step": 1, "loss": 1.0}]})
    with pytest.raises(ValueError, match="holds nothing to report"):
        read_run(tmp_path)


def test_phases_are_exact_or_bounds(tmp_path: Path) -> None:
    run = read_run(logged_run(tmp_path))
    assert run.phases == [LoggedPeak("forward", 6.0, 9.0), LoggedPeak("backward", 9.0, 9.0)]
    assert tables.headlines(run) == ["The most that tensors held on the device: 9.00 GiB, in the phase “backward”."]
    assert phase_peaks(
        {"memory/host_rss_gib": 3.0, "memory/forward_host_rss_gib": 2.0, "memory/allocated_gib": 1.0}
    ) == [LoggedPeak("forward", 2.0, 2.0)]


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (demo_run, ["over time", "time of each design"]),
        (causal_lm_run, ["over time"]),
        (logged_run, ["compared modes"]),
    ],
)
def test_what_a_folder_lacks_is_said(tmp_path: Path, make: Callable[[Path], Path], missing: list[str]) -> None:
    found = read_run(make(tmp_path)).missing
    assert len(found) == len(missing)
    assert all(words in line for words, line in zip(missing, found, strict=True))


def test_figures_without_phases_are_told_how_to_name_them(tmp_path: Path) -> None:
    append_metrics(tmp_path / METRICS_FILE, 1, {"memory/host_rss_gib": 1.5})
    run = read_run(tmp_path)
    assert "name no phase" in run.missing[0]
    assert list(figures_of(run)) == []
