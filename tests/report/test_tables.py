from pathlib import Path

from run_folders import causal_lm_run, demo_run, write_json

from hf_memopt.report import read_run, tables


def test_designs_that_hold_nothing_have_no_share(tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", {"memory_bytes": {"a": {"p": {}}, "b": {"p": {}}}})
    assert [row[-1] for row in tables.holder_table(read_run(tmp_path)).rows] == [None, None]


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
    write_json(tmp_path / "results.json", {"training_cost": {"mode": "auto", "step_ms": 3.0}, "compared_costs": []})
    run = read_run(tmp_path)
    assert "--compare off,all,auto" in run.missing[1]
    assert tables.headlines(run) == []
    assert tables.mode_table(run.modes).heads == ["mode", "step ms"]
