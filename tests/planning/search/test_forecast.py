"""Forecasts of combinations from rows with given memory over a step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from hf_memopt.planning.search.forecast import Forecast
from hf_memopt.planning.workload import Lever

WEIGHTS, ACTIVATIONS = "weights", "activations"
ROOMY = 10_000
MICRO_BATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Simulated:
    """The part of a `Row` that a forecast reads; the card needs 10 more than the fullest part of `profile` holds."""

    settings: Mapping[str, str]
    profile: Mapping[tuple[str, int], Mapping[str, int]]
    update_ms: float
    host_bytes: int = 0
    micro_batch: int = 1

    @property
    def needed_bytes(self) -> int:
        return self.estimate.peak_bytes + 10

    @property
    def estimate(self) -> Any:
        peak = max(sum(uses.values()) for uses in self.profile.values())
        return SimpleNamespace(peak_bytes=peak, host_bytes=self.host_bytes)


def of(weights: int, activations: int) -> dict[str, int]:
    return {WEIGHTS: weights, ACTIVATIONS: activations}


FORWARD, BACKWARD, UPDATE = ("forward", 0), ("backward", 0), ("optimizer", 0)
PLAIN = Simulated(
    {"on the device": "all", "weights": "here"}, {FORWARD: of(50, 50), BACKWARD: of(50, 80), UPDATE: of(90, 0)}, 10.0
)
CHECKPOINTED = Simulated(
    {"on the device": "few", "weights": "here"}, {FORWARD: of(50, 10), BACKWARD: of(50, 20), UPDATE: of(90, 0)}, 13.0
)
# The engine updates elsewhere, so that there is no such phase on the device.
ELSEWHERE = Simulated(
    {"on the device": "all", "weights": "host"}, {FORWARD: of(5, 55), BACKWARD: of(10, 80)}, 15.0, host_bytes=500
)
BOTH = {"on the device": "few", "weights": "host"}


def forecast(*rows: Any, card_bytes: int = ROOMY) -> Forecast:
    return Forecast(rows[0].settings, rows, MICRO_BATCHES, card_bytes, [])


def test_a_row_that_was_simulated_is_its_own_forecast() -> None:
    found = forecast(PLAIN, CHECKPOINTED, ELSEWHERE).of(ELSEWHERE.settings)
    assert (found.needed_bytes, found.host_bytes, found.least_ms) == (100, 500, 15.0)


def test_savings_are_shares_of_a_use_and_other_changes_add_up_at_each_time_of_the_step() -> None:
    found = forecast(PLAIN, CHECKPOINTED, ELSEWHERE).of(BOTH)
    # Forward: weights 5, activations a fifth of 50 and 5 more; backward: 10 and a fourth of 80; 10 beside the peak.
    assert (found.needed_bytes, found.host_bytes, found.least_ms) == (30 + 10, 500, 18.0)


def with_lever(row: Simulated, **levers: str) -> Simulated:
    return replace(row, settings={**row.settings, **levers})


QUANTISED = Simulated(
    {**PLAIN.settings, "bits": "4"}, {FORWARD: of(10, 50), BACKWARD: of(10, 80), UPDATE: of(18, 0)}, 11.0
)


def test_the_same_weights_are_not_saved_twice_and_fewer_bytes_leave_for_the_host() -> None:
    rows = [with_lever(row, bits="16") for row in (PLAIN, CHECKPOINTED, ELSEWHERE)]
    found = forecast(*rows, QUANTISED).of({**ELSEWHERE.settings, "bits": "4"})
    # A fifth of 10 in backward, and of the 500 on the host.
    assert (found.needed_bytes, found.host_bytes) == (2 + 80 + 10, pytest.approx(100))


def test_a_combination_that_was_simulated_corrects_those_that_go_further() -> None:
    rows = [with_lever(row, bits="16") for row in (PLAIN, CHECKPOINTED, ELSEWHERE)]
    both = Simulated({**BOTH, "bits": "16"}, {FORWARD: of(5, 40), BACKWARD: of(10, 50)}, 17.0, host_bytes=600)
    all_three = {**BOTH, "bits": "4"}
    without, with_it = (forecast(*given).of(all_three) for given in ([*rows, QUANTISED], [*rows, QUANTISED, both]))
    assert without.needed_bytes == 2 + 20 + 10
    assert with_it.needed_bytes == 2 + 50 + 10
    assert with_it.host_bytes == pytest.approx(without.host_bytes + 100)
    assert with_it.least_ms == 18.0


def test_one_that_goes_further_in_a_lever_corrects_nothing() -> None:
    rows = [with_lever(row, bits="16") for row in (PLAIN, CHECKPOINTED, ELSEWHERE)]
    further = Simulated({**BOTH, "bits": "4"}, {FORWARD: of(1, 1)}, 1.0)
    wanted = {**BOTH, "bits": "16"}
    assert forecast(*rows, QUANTISED, further).of(wanted) == forecast(*rows, QUANTISED).of(wanted)


@pytest.mark.parametrize(("larger_ms", "expected_ms"), [(None, 15.0 * 0.8), (9.0, 9.0)])
def test_fewer_passes_may_save_time(larger_ms: float | None, expected_ms: float) -> None:
    larger = replace(PLAIN, update_ms=8.0, micro_batch=4)
    rows = [PLAIN, larger, ELSEWHERE]
    if larger_ms is not None:
        rows.append(replace(ELSEWHERE, update_ms=larger_ms, micro_batch=4))
    assert forecast(*rows).of(ELSEWHERE.settings).least_ms == pytest.approx(expected_ms)


@pytest.mark.parametrize(("card_bytes", "expected_ms"), [(179, 13.0 + 0.8), (180, 13.0 * 0.8 + 0.8)])
def test_fewer_passes_that_cannot_fit_save_no_time(card_bytes: int, expected_ms: float) -> None:
    plain, checkpointed = (with_lever(row, bits="16") for row in (PLAIN, CHECKPOINTED))
    rows = [plain, replace(plain, update_ms=8.0, micro_batch=2), checkpointed, QUANTISED]
    rows.append(replace(checkpointed, profile={BACKWARD: of(50, 240)}, update_ms=12.0, micro_batch=2))
    found = forecast(*rows, card_bytes=card_bytes).of({**checkpointed.settings, "bits": "4"})
    # 60 less than the checkpointed run, which needs 300 with two samples: at most twice as much less.
    assert found.needed_bytes == 40
    assert found.least_ms == pytest.approx(expected_ms)


def test_a_much_larger_micro_batch_that_cannot_fit_says_nothing_of_the_second_one() -> None:
    rows = [PLAIN, replace(PLAIN, update_ms=8.0, micro_batch=4), CHECKPOINTED, ELSEWHERE]
    rows.append(replace(CHECKPOINTED, profile={BACKWARD: of(50, 240)}, update_ms=12.0, micro_batch=4))
    assert forecast(*rows, card_bytes=50).of(BOTH) == forecast(*rows).of(BOTH)


def test_an_adaptive_value_has_the_memory_of_the_frugal_one_and_the_plain_time_until_it_is_simulated() -> None:
    lever = Lever("on the device", ("all", "where free", "few"), adaptive={"where free": "few"})
    adaptive = {**PLAIN.settings, "on the device": "where free"}
    expected = Forecast(PLAIN.settings, [PLAIN, CHECKPOINTED], MICRO_BATCHES, ROOMY, [lever]).of(adaptive)
    assert (expected.needed_bytes, expected.least_ms) == (CHECKPOINTED.needed_bytes, PLAIN.update_ms)
    row = replace(CHECKPOINTED, settings=adaptive, update_ms=11.0)
    simulated = Forecast(PLAIN.settings, [PLAIN, CHECKPOINTED, row], MICRO_BATCHES, ROOMY, [lever]).of(adaptive)
    assert simulated.least_ms == 11.0
