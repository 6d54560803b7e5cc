"""Plans as headlines, tables, explanations and JSON, from given figures."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hf_memopt.planning import Lever, MemoryEstimate, Row, SettingsPlan
from hf_memopt.planning.cards.gpus import Card
from hf_memopt.planning.cards.memory_below import Disk
from hf_memopt.planning.estimate_report import Verdict
from hf_memopt.planning.search.table import FAILED, as_json, explain, headline, table
from hf_memopt.units import GIB

CARD = Card("toy card", 8 * GIB, 10e12, 20e12, 500e9, 25e9)
MICRO_BATCHES = (1, 2, 4, 8, 16)
LEVERS = (Lever("checkpointing", ("none", "full")), Lever("offload", ("off", "auto", "all")))


def row(settings: Sequence[str], micro_batch: int, update_ms: float, needed_gib: float, host_gib: float = 0.0) -> Row:
    """Return a candidate for 16 samples per update, whose peak is half a GiB below its need."""
    estimate = MemoryEstimate(
        peak_bytes=round((needed_gib - 0.5) * GIB),
        reserved_bytes=0,
        phase="backward",
        step=2,
        phases={},
        breakdown={"activations": GIB},
        top=(),
        host_bytes=round(host_gib * GIB),
        disk_bytes=0,
        disk_bytes_written=0,
        confidence="high",
        assumptions=(),
        unreached=(),
        step_ms=update_ms,
        step_range_ms=(0.9 * update_ms, 1.2 * update_ms),
        phases_ms={},
        stall_ms=0.0,
        trace=None,  # type: ignore[arg-type]
        storage_kinds=(),
        storage_makers=(),
    )
    names = (lever.name for lever in LEVERS)
    chosen = dict(zip(names, settings, strict=True))
    verdict = Verdict.FITS if needed_gib <= 8 else Verdict.NO
    return Row(chosen, micro_batch, 16 // micro_batch, update_ms, round(needed_gib * GIB), verdict, estimate)


def plan_of(*rows: Row, disk: Disk | None = None) -> SettingsPlan:
    return SettingsPlan("toy", LEVERS, CARD, 32 * GIB, disk, rows, MICRO_BATCHES)


PLAN = plan_of(
    row(("none", "auto"), 4, 200.0, 7.5, host_gib=3.0),
    row(("full", "auto"), 16, 250.0, 6.25, host_gib=1.0),
    row(("full", "off"), 8, 300.0, 8.0),
    row(("none", "auto"), 8, 190.0, 12.0, host_gib=6.0),
    row(("none", "off"), 1, 150.0, 9.0),
    row(("none", "off"), 2, 140.0, 10.0),
)


def test_the_table_has_a_line_for_each_candidate_in_the_plans_order() -> None:
    assert table(PLAN).splitlines() == [
        "| micro-batch | checkpointing | offload | peak GiB | needs GiB | host GiB | peaks during | update | fits |",
        "| ----------- | ------------- | ------- | -------- | --------- | -------- | ------------ | ------ | ---- |",
        "| 4 x 4       | none          | auto    | 7.00     | 7.50      | 3.00     | backward     | 200 ms | yes  |",
        "| 16 x 1      | full          | auto    | 5.75     | 6.25      | 1.00     | backward     | 250 ms | yes  |",
        "| 8 x 2       | full          | off     | 7.50     | 8.00      | 0.00     | backward     | 300 ms | yes  |",
        "| 8 x 2       | none          | auto    | 11.50    | 12.00     | 6.00     | backward     | 190 ms | no   |",
        "| 1 x 16      | none          | off     | 8.50     | 9.00      | 0.00     | backward     | 150 ms | no   |",
        "| 2 x 8       | none          | off     | 9.50     | 10.00     | 0.00     | backward     | 140 ms | no   |",
    ]


def test_the_headline_names_the_choice_and_what_it_needs() -> None:
    assert headline(PLAN).splitlines() == [
        "Train with micro-batch 4 x 4, checkpointing none, offload auto.",
        "That fits on toy card: it needs 7.50 GiB of 8.0 GiB, most of it during backward, and 3.00 GiB of host memory.",
        "toy.",
        "An update of 16 samples takes 200 ms (180 ms to 240 ms: the range of nine in ten published steps on cards of "
        "its family, Ampere and Ada, GeForce).",
    ]


def test_samples_of_tokens_have_a_rate_and_remarks_follow() -> None:
    noted = replace(PLAN.best, estimate=replace(PLAN.best.estimate, notes=("mind the gap",)))
    lines = headline(replace(plan_of(noted), tokens_per_sample=1024)).splitlines()
    assert lines[3].endswith(" That is 81,920 tokens per second.")  # 16 x 1024 in 200 ms
    assert lines[4] == "Note: mind the gap"


def test_memory_of_nccl_may_decide() -> None:
    just = replace(PLAN.best, verdict=Verdict.ONLY_JUST)
    assert just.fits
    assert table(plan_of(just)).endswith("| only just |")
    assert headline(plan_of(just)).splitlines()[1].startswith("That fits only just on toy card: it needs 7.50 GiB")


def test_a_failed_simulation_is_shown_below_the_table() -> None:
    found = replace(plan_of(PLAN.best), impossible={frozenset({("offload", "all")}): f"{FAILED}KeyError: 3"})
    assert str(found).endswith(" |\n\noffload all: the simulation failed: KeyError: 3")


def test_values_that_are_not_possible_say_why() -> None:
    alone, both = frozenset({("offload", "all")}), frozenset({("offload", "auto"), ("checkpointing", "full")})
    found = replace(plan_of(PLAN.best), impossible={alone: "no disk\nand a trace", both: "too much"})
    assert "offload all is not possible here: no disk" in explain(found)
    assert "checkpointing full with offload auto is not possible: too much" in explain(found)
    assert as_json(found)["impossible"][0] == {"settings": {"offload": "all"}, "reason": "no disk\nand a trace"}


def test_a_plan_prints_itself_in_full() -> None:
    assert str(PLAN) == f"{headline(PLAN)}\n\n{table(PLAN)}"


def test_each_other_value_is_explained_by_its_best_candidate() -> None:
    assert explain(PLAN) == [
        "micro-batch 4: 8 would need 12.00 GiB with these settings.",
        "checkpointing none, not full: with full an update takes 1.25 times as long.",
        "offload auto, not off: with off an update takes 1.50 times as long.",
        "offload auto, not all: not needed, since the whole batch fits without it.",
        "Kept free, assumed: device context 512 MiB, cuDNN and other workspaces 112 MiB.",
    ]


def test_a_value_with_which_nothing_fits_says_how_much_it_would_need() -> None:
    rows = [each for each in PLAN.rows if each.settings != {"checkpointing": "full", "offload": "off"}]
    lines = explain(plan_of(*rows))
    assert "offload auto, not off: with off nothing fits; 9.00 GiB at least." in lines


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([row(("none", "off"), 16, 100.0, 7.0)], "micro-batch 16: the whole batch fits at once."),
        (
            [row(("none", "off"), micro_batch, ms, 7.0) for micro_batch, ms in ((4, 100.0), (16, 150.0), (8, 120.0))],
            "micro-batch 4, not 8: an update takes 1.20 times as long.",
        ),
    ],
)
def test_the_next_larger_micro_batch_says_why_not(rows: list[Row], line: str) -> None:
    assert explain(plan_of(*rows))[0] == line


def test_what_was_assumed_and_what_did_not_run_is_said() -> None:
    unreached = tuple(f"layer.{number}" for number in range(7))
    best = PLAN.best
    assumed = replace(best.estimate, assumptions=("a guess (2 times)", "another"), unreached=unreached)
    lines = explain(plan_of(replace(best, estimate=assumed)))
    assert lines[-3:] == [
        "Assumed: a guess (2 times).",
        "Assumed: another.",
        "Got no gradient in the simulation: layer.0, layer.1, layer.2, layer.3, layer.4.",
    ]


def test_json_has_all_that_the_table_shows_in_bytes_and_milliseconds() -> None:
    found: dict[str, Any] = json.loads(json.dumps(as_json(PLAN)))
    assert (found["workload"], found["card"]["name"], found["host_bytes"]) == ("toy", "toy card", 32 * GIB)
    assert sum(found["allowances"].values()) == 624 * 2**20
    assert len(found["rows"]) == len(PLAN.rows)
    assert found["rows"][0] == {
        "settings": {"checkpointing": "none", "offload": "auto"},
        "micro_batch": 4,
        "accumulation": 4,
        "verdict": "fits",
        "update_ms": 200.0,
        "relative_time": 1.0,
        "update_range_ms": [180.0, 240.0],
        "needed_bytes": 7.5 * GIB,
        "peak_bytes": 7 * GIB,
        "host_bytes": 3 * GIB,
        "disk_bytes": 0,
        "disk_bytes_written": 0,
        "disk_tb_per_day": 0.0,
        "phase": "backward",
        "breakdown": {"activations": GIB},
        "confidence": "high",
        "assumptions": [],
    }


def test_a_disk_has_a_column_a_line_and_its_bytes() -> None:
    best = row(("none", "all"), 4, 200.0, 7.5, host_gib=3.0)
    on_disk = replace(best.estimate, disk_bytes=5 * GIB, disk_bytes_written=4 * GIB)
    found = plan_of(replace(best, estimate=on_disk), disk=Disk(500 * GIB, 5e9))
    heads, _, cells = (line.split("|") for line in table(found).splitlines())
    assert cells[[head.strip() for head in heads].index("disk GiB")].strip() == "5.00"
    # 4 GiB in 0.2 s
    assert "Disk: 5.00 GiB; 4.00 GiB written in a step, 1855.43 TB per day at this rate." in explain(found)
    assert as_json(found)["disk"] == {"num_bytes": 500 * GIB, "bytes_per_s": 5e9}
    assert as_json(found)["rows"][0]["disk_tb_per_day"] == pytest.approx(4 * GIB * 5 * 86_400 / 1e12)


@pytest.mark.parametrize(
    ("micro_batch", "reason"),
    [(16, "the whole batch fits at once"), (4, "larger ones exceed the card's memory by far, or save no time")],
)
def test_a_micro_batch_alone_among_its_settings_has_a_reason(micro_batch: int, reason: str) -> None:
    found = plan_of(row(("none", "auto"), micro_batch, 200.0, 7.5))
    assert explain(found)[0] == f"micro-batch {micro_batch}: {reason}."
    given = replace(plan_of(row(("none", "auto"), 4, 200.0, 7.5)), micro_batches=(4,))
    assert explain(given)[0] == "micro-batch 4: as given."


def test_an_adaptive_value_that_was_not_simulated_was_not_forecast_to_be_faster() -> None:
    lever = Lever("offload", ("off", "auto", "all"), adaptive={"auto": "all"})
    found = replace(plan_of(row(("none", "all"), 4, 200.0, 7.5)), levers=(LEVERS[0], lever))
    assert "offload all, not auto: with auto none was forecast to fit in less time." in explain(found)
