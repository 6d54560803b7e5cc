from pathlib import Path
from typing import Any

import pytest
from run_folders import causal_lm_run, demo_run, logged_run, write_json

from hf_memopt.memory.logger import METRICS_FILE, append_metrics
from hf_memopt.report import read_run, tables


def test_designs_that_hold_nothing_have_no_share(tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", {"memory_bytes": {"a": {"p": {}}, "b": {"p": {}}}})
    assert [row[-1] for row in tables.holder_table(read_run(tmp_path)).rows] == [None, None]


def test_modes_are_compared_with_the_first(tmp_path: Path) -> None:
    run = read_run(causal_lm_run(tmp_path))
    table = tables.mode_table(run.modes)
    assert table.heads == ["mode", "saved MiB", "predicted MiB", "moved MiB/step", "step ms", "compared"]
    assert table.rows == [
        ["off", 100.0, None, None, 50.0, "reference"],
        ["<all>", 25.0, None, 80.5, 75.0, "equal, bit for bit"],
        ["auto", 50.0, 50.0, None, 60.0, "different, not by rounding"],
    ]
    assert tables.headlines(run) == [
        "Saved activations on the device at the peak: 100.0 MiB in mode off, 25.0 MiB in mode <all> (75% less)."
    ]
    run.facts["device"] = "Some GPU"
    run.modes[0]["peak_mib"], run.modes[2]["peak_mib"] = 400.0, 300.0
    assert tables.headlines(run) == [
        "Peak of the device's memory: 400.0 MiB in mode off, 300.0 MiB in mode auto (25% less), in 1.20 times the time."
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


def test_a_run_of_one_mode_is_told_how_to_compare(tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", {"training_cost": {"mode": "auto", "step_ms": 3.0}})
    run = read_run(tmp_path)
    assert "hf-memopt compare RECIPE --modes off,all,auto" in run.missing[1]
    assert tables.headlines(run) == []
    assert tables.mode_table(run.modes).heads == ["mode", "step ms"]


def test_modes_that_differ_are_those_that_were_compared() -> None:
    modes: list[dict[str, Any]] = [
        {"mode": "off", "step_ms": 1.0, "compared": "reference"},
        {"mode": "all", "step_ms": 1.0, "compared": "equal, bit for bit", "equal": True},
        {"mode": "auto", "step_ms": 1.0, "compared": "equal but for rounding", "equal": False},
        {"mode": "inputs", "step_ms": None, "failure": "out of memory"},
        {"mode": "other", "step_ms": 1.0},
    ]
    shown = [row[-1] for row in tables.mode_table(modes).rows]
    assert shown == ["reference", "equal, bit for bit", "equal but for rounding", "out of memory", "not compared"]
    assert tables.differing_modes(modes) == ["auto"]


def test_equal_modes_are_said_first(tmp_path: Path) -> None:
    modes = [{"mode": "off", "step_ms": 1.0}, {"mode": "all", "step_ms": 1.0, "equal": True}]
    write_json(tmp_path / "comparison.json", {"modes": modes})
    (line,) = tables.headlines(read_run(tmp_path))
    assert line == "Losses, gradients and weights are equal, bit for bit, in modes off, all."
    modes[1]["equal"] = False
    write_json(tmp_path / "comparison.json", {"modes": modes})
    assert tables.headlines(read_run(tmp_path)) == []


def test_a_mode_that_failed_is_said_first(tmp_path: Path) -> None:
    off = {"mode": "off", "step_ms": None, "failure": "out of memory"}
    write_json(tmp_path / "comparison.json", {"device": "cuda", "modes": [off, {"mode": "all", "step_ms": 3.0}]})
    run = read_run(tmp_path)
    assert tables.headlines(run) == ["Mode off: out of memory."]
    assert run.facts["device"] == "cuda"
    write_json(tmp_path / "comparison.json", {"modes": [{"mode": "off", "step_ms": None}]})
    with pytest.raises(ValueError, match="its modes is not made of objects with mode, step_ms above 0"):
        read_run(tmp_path)


def test_a_peak_that_is_exact_has_one_column(tmp_path: Path) -> None:
    append_metrics(tmp_path / METRICS_FILE, 1, {"memory/host_rss_gib": 1.5, "memory/forward_host_rss_gib": 1.25})
    table = tables.phase_table(read_run(tmp_path))
    assert (table.heads, table.rows) == (["phase", "GiB"], [["forward", 1.25]])
    ranges = tables.phase_table(read_run(logged_run(tmp_path / "ranges")))
    assert ranges.heads == ["phase", "at least GiB", "at most GiB"]
