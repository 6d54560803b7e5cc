"""Estimates against measurements by others on real GPUs."""

import csv
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import BENCHMARKS, loaded_benchmarks

from hf_memopt.planning.cards.gpus import time_range

# Shares of the measured bytes, where the configuration is fully known.
ALLOCATED, ALLOCATED_ON_T4, RESERVED = 0.005, 0.002, 0.05
KNOWN = [
    f"{path.stem} {row['id']}"
    for path in sorted((BENCHMARKS / "published" / "measured").glob("*.json"))
    for row in json.loads(path.read_text())["rows"]
    if not {"unknown", "not_simulated"} & (json.loads(path.read_text())["shared"].keys() | row.keys())
    and row.get("role") != "repeat"
    and {"allocated_mib", "reserved_mib"} & row.keys()
]
CHEAP = ("fitcheck_t4 t4-sweep-2026-09-15[21]", "fitcheck_t4 t4-sweep-2026-09-15[37]")


@pytest.fixture(scope="module")
def published() -> Any:
    with loaded_benchmarks() as load:
        yield load("published.__main__")


@pytest.fixture(scope="module")
def results(published: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(published.RESULTS.read_text())
    return found


def check(published: Any, row: Any, estimate: dict[str, float]) -> None:
    allocated = ALLOCATED_ON_T4 if row.gpu == "t4" else ALLOCATED
    for figure, tolerance in (("allocated_mib", allocated), ("reserved_mib", RESERVED)):
        measured = getattr(row, figure)
        assert measured is None or estimate[figure] == pytest.approx(measured, rel=tolerance), (row.name, figure)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in CHEAP else pytest.mark.slow) for n in KNOWN])
def test_what_was_measured_is_estimated(published: Any, name: str) -> None:
    (row,) = [row for row in published.measurements() if row.name == name]
    check(published, row, published.figures(row))


def test_the_committed_estimates_are_as_close(published: Any, results: dict[str, Any]) -> None:
    rows = {row.name: row for row in published.measurements()}
    estimates = {f"{row['source']} {row['id']}": row["estimate"] for row in results["rows"]}
    assert len(KNOWN) >= 20
    for name in KNOWN:
        check(published, rows[name], estimates[name])


def test_every_row_names_its_source_and_has_an_estimate_or_a_reason(published: Any, results: dict[str, Any]) -> None:
    for file in published.sources().values():
        assert all(file[name] for name in ("source", "licence", "kind", "rows"))
    estimates = {(row["source"], row["id"]): row["estimate"] for row in results["rows"]}
    for row in published.measurements():
        assert row.has_memory or row.step_s
        assert not row.has_memory or (estimates[row.source, row.id] is None) == bool(row.not_simulated)


def test_the_page_shows_the_committed_results(published: Any, results: dict[str, Any]) -> None:
    text = published.PAGE.read_text(encoding="utf-8")
    assert f"{published.BEGIN}\n\n{published.report(results)}\n\n{published.END}" in text
    with published.TABLE.open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == published.rows_as_text(results)


@pytest.fixture(scope="module")
def times() -> Any:
    with loaded_benchmarks() as load:
        yield load("published.times")


@pytest.fixture(scope="module")
def unseen(times: Any) -> dict[str, float]:
    found: dict[str, float] = times.unseen()
    return found


def test_the_range_of_each_family_holds_nine_in_ten_of_its_steps(times: Any, unseen: dict[str, float]) -> None:
    rows = [row for row in times.timed() if not row.time_unknown]
    assert len(rows) >= 200
    for family in {times.family(row) for row in rows}:
        card = next(times.card_of(row.gpu) for row in rows if times.family(row) == family)
        deviations = times.deviations(unseen, of=family)
        assert statistics.median(map(abs, deviations)) <= (0.11 if family == "A100" else 0.1), family
        ratios = [1 / (1 + share) for share in deviations]
        quantiles = statistics.quantiles(ratios, n=20, method="inclusive")[::18]
        assert time_range(card) == pytest.approx(quantiles, abs=0.01), family


def test_a_step_takes_a_time_within_the_range(published: Any, times: Any) -> None:
    name = "transformers_sdpa bert-base-uncased, 4 x 512, sdpa"
    (row,) = [row for row in published.measurements() if row.name == name]
    low, high = time_range(times.card_of(row.gpu))
    assert low < 1e3 * row.step_s / published.estimate(row).step_ms < high


def test_methods_on_one_card_are_in_the_right_order(times: Any, unseen: dict[str, float]) -> None:
    """Accept one wrong pair: its source has the opposite sign for the same tokens in one sequence, as predicted."""
    pairs = times.pairs(unseen)
    wrong = [pair.name for pair in pairs if not pair.is_right]
    assert len(pairs) >= 100
    assert len(wrong) == 1
    assert wrong[0].startswith("t4, Qwen2.5-1.5B-Instruct, 2 x 1024: fp16, sdpa")


def test_the_page_shows_the_committed_times(published: Any, times: Any, unseen: dict[str, float]) -> None:
    begin, end = published.TIMES
    assert f"{begin}\n\n{times.report(unseen)}\n\n{end}" in published.PAGE.read_text(encoding="utf-8")


def test_a_page_without_marks_is_refused(published: Any, results: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="put them where the table belongs"):
        published.write_page(results, page)


def test_a_row_that_was_measured_again_is_estimated_once(published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(published, "figures", lambda row: calls.append(row.id) or {"allocated_mib": 1.0})
    repeats = [row for row in published.measurements() if row.model == "SmolLM2-1.7B" and row.batch_size == 4]
    compared = published.compare([row for row in repeats if row.attention == "sdpa" and not row.base])
    assert (len(compared), len(calls)) == (3, 1)
    assert all(each["estimate"] == {"allocated_mib": 1.0} for each in compared)
