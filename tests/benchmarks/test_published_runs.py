"""Published runs, and the estimates of the command for them."""

import json
import statistics
from typing import Any

import pytest
from benchmark_runs import loaded_benchmarks

# Of dense models on one GPU. Adapters beside 4 bits that nobody has prepared took 0.6 to 0.8 GiB more than estimated.
STRICT, UNPREPARED = 0.03, 0.045


@pytest.fixture(scope="module")
def runs() -> Any:
    with loaded_benchmarks() as load:
        yield load("published.runs")


@pytest.fixture(scope="module")
def results(runs: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(runs.RESULTS.read_text())
    return found


def test_every_run_has_an_answer_and_every_source_its_name(runs: Any, results: dict[str, Any]) -> None:
    assert [row["id"] for row in results["rows"]] == [row["id"] for source in runs.sources() for row in source["rows"]]
    for source in runs.sources():
        assert all(source[name] for name in ("source", "address", "licence", "kind", "gpu", "stack"))
        assert all((runs.measured(row) is not None) == row.get("ran", True) for row in source["rows"])


def test_the_verdicts_are_those_of_the_card(runs: Any, results: dict[str, Any]) -> None:
    """Accept one wrong verdict: unsloth computed its longest contexts by a straight line."""
    answers = {row["id"]: row["answer"] for row in results["rows"]}
    rows = [row for source in runs.sources() for row in source["rows"]]
    assert len(rows) >= 20
    assert [row["id"] for row in rows if not runs.is_right(row, answers[row["id"]])] == [
        "unsloth, Llama-3.3-70B, 80 GB"
    ]


def test_dense_models_on_one_gpu_are_estimated_closely(runs: Any, results: dict[str, Any]) -> None:
    answers = {row["id"]: row["answer"] for row in results["rows"]}
    rows = [row for source in runs.sources() for row in source["rows"]]
    dense = [row for row in rows if row["model"] == "Mistral-7B-v0.1" and "--num-gpus" not in row["flags"]]
    far = {row["id"]: abs(answers[row["id"]]["allocated_mib"] / row["allocated_mib"] - 1) for row in dense}
    unprepared = {row["id"] for row in dense if "--kbit-preparation none" in row["flags"]}
    assert (len(far), len(unprepared)) == (8, 2)
    assert max(far[each] for each in far.keys() - unprepared) <= STRICT
    assert max(far[each] for each in unprepared) <= UNPREPARED


def test_half_of_the_runs_of_language_models_are_estimated_within_two_and_a_half_percent(
    runs: Any, results: dict[str, Any]
) -> None:
    answers = {row["id"]: row["answer"] for row in results["rows"]}
    rows = [row for source in runs.sources() for row in source["rows"] if row["model"][:3] not in ("Cog", "LTX")]
    known = [(row, runs.measured(row)) for row in rows if runs.measured(row) and "remark" not in row]
    far = [abs(answers[row["id"]][figure] / row[figure] - 1) for row, figure in known]
    assert len(far) >= 25
    assert statistics.median(far) <= 0.025


def test_denoisers_are_estimated_within_what_the_allocator_leaves_open(runs: Any, results: dict[str, Any]) -> None:
    answers = {row["id"]: row["answer"] for row in results["rows"]}
    rows = [row for source in runs.sources() for row in source["rows"] if row["model"][:3] in ("Cog", "LTX")]
    rows = [row for row in rows if "remark" not in row]
    far = [abs(answers[row["id"]]["reserved_mib"] / row["reserved_mib"] - 1) for row in rows]
    assert len(far) == 12
    assert max(far) <= 0.08
    assert sum(each <= 0.025 for each in far) >= 8


def test_the_page_shows_the_committed_answers(runs: Any, results: dict[str, Any]) -> None:
    begin, end = runs.MARKS
    assert f"{begin}\n\n{runs.report(results)}\n\n{end}" in runs.PAGE.read_text(encoding="utf-8")


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_is_asked_as_a_user_would(runs: Any) -> None:
    row = {"model": "SmolLM2-135M", "flags": "--seq-len 64 --dtype bfloat16 --lora-rank 4"}
    answer = runs.ask(row, "a100-80gb")
    assert answer["verdict"] == "fits"
    assert 0 < answer["allocated_mib"] < answer["needed_mib"]
    assert runs.is_right({"ran": True}, answer)
    assert not runs.is_right({"ran": False}, answer)
