"""Tests of benchmarks/exactness: its rows, its pairs of functions, and the committed answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import Load

ROOT = Path(__file__).parents[2]
COMMITTED: list[dict[str, Any]] = json.loads(
    (ROOT / "benchmarks" / "results" / "who-is-exact-cpu-intel-r-xeon-r-processor.json").read_text()
)["rows"]
EQUAL = {"num_gradients": 3, "num_steps": 2, "verdict": "equal", "not_compared": [], "first": None, "worst": None}


def of(project: str, switch: str) -> dict[str, Any]:
    (found,) = (row for row in COMMITTED if (row["project"], row["switch"]) == (project, switch))
    return found


def test_each_row_is_committed_with_the_command_that_made_it(load: Load) -> None:
    rows, shown = load("exactness.rows").ROWS, load("exactness.who_is_exact").shown_command
    committed = [(row["project"], row["switch"], row["command"], row["note"], row["issue"]) for row in COMMITTED]
    assert committed == [(row.project, row.switch, shown(row), row.note, row.issue) for row in rows]


def test_all_rows_of_this_library_are_equal() -> None:
    verdicts = [row["report"]["verdict"] for row in COMMITTED if row["project"] == "hf_memopt"]
    assert verdicts
    assert set(verdicts) == {"equal"}


def test_the_known_fault_is_found_and_named_at_its_place() -> None:
    report = of("torch", "activation_memory_budget=0.5, dropout")["report"]
    assert (report["verdict"], report["first"]["phase"], report["losses_equal"]) == ("different", "gradient", True)
    assert of("torch", "activation_memory_budget=0.5")["report"]["verdict"] == "equal"


def test_other_arithmetic_is_never_called_equal() -> None:
    controls = [row for row in COMMITTED if "must not be equal" in row["note"]]
    assert controls
    assert not any(row["report"]["equal"] for row in controls)


@pytest.mark.parametrize(
    ("pair", "verdict"),
    [
        ("checkpoint", "equal"),
        ("checkpoint-reentrant", "equal"),
        ("checkpoint-other-masks", "different"),
        ("selective", "equal"),
        ("our-selective", "equal"),
        ("save_on_cpu", "equal"),
    ],
)
def test_pairs_with_dropout(load: Load, pair: str, verdict: str) -> None:
    from hf_memopt import verify

    assert verify(*load("exactness.pairs").PAIRS[pair](0.1)).verdict == verdict


def test_a_row_that_fails_says_why_and_the_others_go_on(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    who = load("exactness.who_is_exact")

    def run(row: Any) -> tuple[dict[str, Any] | None, str]:
        return (None, "Traceback\nOSError: no room") if "disk" in row.switch else (EQUAL, "")

    monkeypatch.setattr(who, "run", run)
    who.main(["--rows", "hf_memopt", "CPUOffloadOptimizer", "--output", str(tmp_path / "rows.json")])
    printed = capsys.readouterr().out
    assert "| offload=all, to a disk | failed | OSError: no room |" in printed
    assert "| offload=all | equal |  |" in printed
    assert "| CPUOffloadOptimizer | not run | asserts CUDA or XPU | - |" in printed


def test_rows_that_are_not_measured_again_stay(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    who, file = load("exactness.who_is_exact"), tmp_path / "rows.json"
    monkeypatch.setattr(who, "run", lambda row: (EQUAL, ""))
    who.main(["--rows", "hf_memopt: base", "--output", str(file)])
    monkeypatch.setattr(who, "run", lambda row: (None, "failed now"))
    who.main(["--rows", "base=file, LoRA", "SelectiveCheckpoint", "--output", str(file)])
    found = {row["switch"]: "error" in row for row in json.loads(file.read_text())["rows"]}
    assert found == {
        "base=host, LoRA": False,
        "base=file, LoRA": True,
        "base=file, checkpointing": False,
        "SelectiveCheckpoint, dropout": True,
    }


def test_a_name_that_no_row_has_is_refused(load: Load) -> None:
    with pytest.raises(ValueError, match=r"--rows nothing: no row has such a text; there are \d+ rows"):
        load("exactness.who_is_exact").main(["--rows", "nothing"])
