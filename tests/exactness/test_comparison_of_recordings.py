"""Comparison of recordings that were made elsewhere: other cuts, layouts and ranks, and tensors that one run lacks."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hf_memopt.exactness.comparison import ROUNDINGS_ALLOWED, Yardstick, compare
from hf_memopt.exactness.recording import Fingerprint, Phase, Recording, TensorPlace
from hf_memopt.exactness.runs import compare_runs, merged

Values = Mapping[tuple[int, int, Phase, str], Any]


def recording(values: Values, **others: Any) -> Recording:
    tensors = {TensorPlace(*place): Fingerprint.of(torch.as_tensor(value)) for place, value in values.items()}
    return Recording(tensors, **others)


STEP: Values = {
    (0, 0, "start", "w"): [1.0, 2.0],
    (1, 1, "input", "x"): [1.0, 2.0, 3.0],
    (1, 1, "loss", "loss"): 4.0,
    (1, 1, "gradient", "w"): [0.5, 1.0],
    (1, 0, "weight", "w"): [0.9, 1.9],
    (1, 0, "optimizer", "step of w"): 1.0,
}


def without(*phases: Phase) -> Values:
    return {place: value for place, value in STEP.items() if place[2] not in phases}


def test_equal_ones() -> None:
    found = compare(recording(STEP), recording(STEP))
    assert found.verdict == "equal"
    assert (found.first, found.worst, found.not_compared) == (None, None, [])
    assert found.num_compared == dict.fromkeys(("start", "input", "loss", "gradient", "weight", "optimizer"), 1)
    assert found.num_gradients == 1


def test_without_a_yardstick_each_difference_counts() -> None:
    found = compare(recording(STEP), recording({**STEP, (1, 1, "loss", "loss"): 4.0 + 2**-21}))
    assert found.verdict == "different"
    assert found.first is not None
    assert found.first.roundings == pytest.approx(1)


@pytest.mark.parametrize(("share", "verdict"), [(0.2, "rounding"), (0.9, "rounding"), (1.1, "different")])
def test_some_multiples_of_the_change_by_one_rounding_are_allowed(share: float, verdict: str) -> None:
    loss, roundings = (1, 1, "loss", "loss"), share * ROUNDINGS_ALLOWED[1]
    yardstick = Yardstick(recording({**STEP, loss: 4.0 * (1 + 3 * 2**-20)}))
    switched = recording({**STEP, loss: 4.0 * (1 - 3 * roundings * 2**-20)})
    assert compare(recording(STEP), switched, yardstick).verdict == verdict


@pytest.mark.parametrize(("roundings", "verdict"), [(3, "rounding"), (300, "different")])
def test_no_run_is_more_exact_than_its_arithmetic(roundings: int, verdict: str) -> None:
    switched = recording({**STEP, (1, 1, "gradient", "w"): [0.5, 1.0 + roundings * 2**-23]})
    assert compare(recording(STEP), switched, Yardstick(recording(STEP))).verdict == verdict


@pytest.mark.parametrize(("left", "verdict"), [(0.0, "rounding"), (0.1, "rounding"), (1.0, "different")])
def test_what_is_left_in_float32_is_judged(left: float, verdict: str) -> None:
    """All three differ by 0.01 from the plain run, and its rounding is 0.02."""
    loss = (1, 1, "loss", "loss")
    plain, switched = recording(STEP, precision="bfloat16"), recording({**STEP, loss: 4.01})
    in_float32 = [recording({**STEP, loss: 4.02 + each}) for each in (0.0, 0.02 * left)]
    found = compare(plain, switched, Yardstick(*in_float32))
    assert found.verdict == verdict
    assert found.first is not None
    assert found.first.of_yardstick == pytest.approx(left, abs=1e-4)


def test_a_setting_of_the_optimizer_has_no_rounding() -> None:
    runs = [recording({**STEP, (1, 0, "setting", "lr of w"): value}) for value in (1e-5, 1e-5 * (1 + 1e-6))]
    assert compare(runs[0], runs[1], Yardstick(runs[0])).verdict == "different"
    assert compare(runs[0], recording(STEP)).verdict == "equal"  # kept elsewhere


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "rounding"), (1.02, "small")])
def test_a_factor_beneath_rounding_is_systematic(factor: float, verdict: str) -> None:
    generator = torch.Generator().manual_seed(0)
    runs = [{}, {}, {}]
    for number in range(8):
        plain, noise, other = torch.randn(3, 10_000, generator=generator).unbind()
        for run, gradient in zip(runs, (plain, factor * plain + 0.02 * noise, plain + 0.02 * other), strict=True):
            run[1, 1, "gradient", f"w{number}"] = gradient
    runs = [recording(run) for run in runs]
    found = compare(runs[0], runs[1], Yardstick(runs[2]))
    assert found.verdict == verdict
    assert (found.first is not None and "times the plain ones" in found.first.systematic) is (verdict == "small")


def test_bits_of_a_lower_precision_are_systematic() -> None:
    gradient, value = (1, 1, "gradient", "w"), torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    runs = [recording({gradient: each}) for each in (value, value.bfloat16().float())]
    found = compare(runs[0], runs[1], Yardstick(runs[1]))
    assert found.verdict == "small"
    assert found.first is not None
    assert found.first.systematic == "its elements have 8 significant bits instead of 24"


def test_an_update_after_equal_gradients_is_judged_by_the_weights_own_rounding() -> None:
    weight = (1, 0, "weight", "w")
    plain = recording(STEP, precision="bfloat16")
    yardstick = Yardstick(recording({**STEP, weight: [0.91, 1.92]}))
    assert compare(plain, recording({**STEP, weight: [0.901, 1.9]}), yardstick).verdict == "different"
    assert compare(plain, recording({**STEP, weight: [0.9 + 6e-8, 1.9]}), yardstick).verdict == "rounding"


def test_values_of_another_dtype_differ() -> None:
    switched = recording({**STEP, (1, 1, "loss", "loss"): torch.tensor(4.0, dtype=torch.bfloat16)})
    found = compare(recording(STEP), switched)
    assert found.verdict == "different"
    assert found.first is not None
    assert found.first.relative == 0


def test_not_a_number_never_has_the_size_of_rounding() -> None:
    gradient = (1, 1, "gradient", "w")
    broken = recording({**STEP, gradient: [math.nan, 1.0]})
    for plain, switched, yardstick in ((STEP, broken, STEP), (broken, STEP, broken)):
        runs = [each if isinstance(each, Recording) else recording(each) for each in (plain, switched, yardstick)]
        assert compare(runs[0], runs[1], Yardstick(runs[2])).verdict == "different"
    # A rounded run that overflows is no measure.
    other = recording({**STEP, gradient: [5.0, 1.0]})
    assert compare(recording(STEP), other, Yardstick(broken)).verdict == "different"
    # Two different kinds of them in both runs.
    other = recording({**STEP, gradient: [math.inf, 1.0]})
    assert compare(broken, other, Yardstick(broken)).verdict == "different"


def test_batch_4_against_2_times_2_compares_the_last_gradients() -> None:
    plain = recording(STEP)
    cut = {**without("input", "loss", "gradient")}
    for micro_batch in (1, 2):
        cut[1, micro_batch, "input", "x"] = [1.0]
        cut[1, micro_batch, "loss", "loss"] = 2.0
        cut[1, micro_batch, "gradient", "w"] = [0.25 * micro_batch, 0.5 * micro_batch]
    cut[1, 3, "input", "x"] = [1.0]  # a forward pass that nothing runs backward
    found = compare(plain, recording(cut))
    assert found.verdict == "equal"
    assert found.num_compared == {"start": 1, "gradient": 1, "weight": 1, "optimizer": 1}
    assert found.has_other_layout
    assert found.not_compared == ["inputs and losses: the runs cut their steps into different numbers of micro-batches"]
    cut[1, 2, "gradient", "w"] = [0.5, 1.1]
    assert compare(plain, recording(cut)).verdict == "different"


def test_inputs_of_other_shapes_are_another_layout() -> None:
    found = compare(recording(STEP), recording({**STEP, (1, 1, "input", "x"): [[1.0, 2.0, 3.0, 0.0]]}))
    assert found.verdict == "equal"
    assert found.has_other_layout
    assert found.not_compared == ["inputs: input x of micro-batch 1 of step 1 has the shape (1, 4) instead of (3,)"]


@pytest.mark.parametrize(
    ("phases", "reason"),
    [
        (("gradient",), "gradient: the switched run keeps no gradients in .grad"),
        (("start", "weight"), "weight: the switched run holds its weights elsewhere"),
        (("optimizer",), "optimizer: the optimizers keep different states"),
        (("input",), "input: the runs call their models with other arguments"),
    ],
)
def test_what_a_run_keeps_elsewhere_is_not_compared(phases: tuple[Phase, ...], reason: str) -> None:
    found = compare(recording(STEP), recording(without(*phases)))
    assert found.verdict == "equal"
    assert reason in found.not_compared
    assert not set(phases) & set(found.num_compared)


def test_gradients_may_not_lack_where_no_update_shows_them() -> None:
    without_update = {**STEP, (1, 0, "weight", "w"): [1.0, 2.0]}
    found = compare(recording(without_update), recording({**without_update} | {}))
    assert found.verdict == "equal"
    lacking = {place: value for place, value in without_update.items() if place[2] != "gradient"}
    found = compare(recording(without_update), recording(lacking))
    assert found.verdict == "different"
    assert found.first is not None
    assert found.first.place.phase == "gradient"
    assert compare(recording(STEP), recording(without("gradient", "weight"))).verdict == "different"


@pytest.mark.parametrize(("name", "verdict"), [("leaf 2", "equal"), ("input x", "equal"), ("v", "different")])
def test_a_gradient_that_the_switched_run_has_besides(name: str, verdict: str) -> None:
    more = {**STEP, (1, 1, "gradient", name): [1.0]}
    assert compare(recording(STEP), recording(more)).verdict == verdict
    assert compare(recording(more), recording(STEP)).verdict == "different"


def test_ranks_are_merged_in_the_order_of_steps() -> None:
    first = recording(STEP, peak_bytes=3, step_s=[1.0, 5.0], recording_s=1.0)
    second = recording(
        STEP, peak_bytes=7, step_s=[2.0, 3.0], recording_s=0.5, has_dropout=True, not_deterministic=["b"]
    )
    found = merged([first, second])
    assert [place.name for place in found.tensors][:4] == ["w", "rank 1: w", "x", "rank 1: x"]
    assert (found.peak_bytes, found.step_s, found.recording_s) == (7, [2.0, 5.0], 1.0)
    assert (found.has_dropout, found.not_deterministic) == (True, ["b"])
    assert dataclasses.replace(merged([first])) == first


def test_data_that_differ_on_another_rank_are_found_first() -> None:
    # The exchanged gradients differ on rank 0 too.
    broken = {**STEP, (1, 1, "gradient", "w"): [9.0, 9.0]}
    of_rank = {**broken, (1, 1, "input", "x"): [7.0, 2.0, 3.0]}
    found = compare(merged([recording(STEP)] * 2), merged([recording(broken), recording(of_rank)]))
    assert found.first is not None
    assert str(found.first.place) == "input rank 1: x of micro-batch 1 of step 1"


def test_the_order_of_runs() -> None:
    ordered: list[tuple[str, str | None]] = []

    def record(
        switched: Values,
        again: Values = STEP,
        in_float32: Values = STEP,
        fails: str = "",
        precision: str | None = None,
    ) -> Any:
        ordered.clear()

        def run(kind: str, dtype: str | None) -> Recording:
            ordered.append((kind, dtype))
            values = {"switched": switched, "plain again": again, "plain, in float32": in_float32}.get(kind, STEP)
            if kind == fails:
                raise RuntimeError("it needs bfloat16")
            return recording(values, precision=precision)

        return run

    changed = {**STEP, (1, 1, "loss", "loss"): 5.0}
    assert compare_runs(record(STEP)).verdict == "equal"
    assert ordered == [("plain", None), ("switched", None), ("plain again", None)]
    assert compare_runs(record(changed)).verdict == "different"
    assert ordered[3:] == [("plain, rounded once", "float64")]
    assert compare_runs(record(changed, precision="bfloat16")).verdict == "different"
    assert ordered[3:] == [("plain, in float32", None), ("plain, rounded once", "float64")]  # nothing to cast
    coarse = {**STEP, (1, 1, "loss", "loss"): 4.01}
    assert compare_runs(record(changed, in_float32=coarse, precision="bfloat16")).verdict == "different"
    in_float32 = [("plain, in float32", None), ("switched, in float32", None)]
    assert ordered[3:] == [in_float32[0], ("plain, rounded once", "bfloat16")]  # gradients without bits of float32
    exact = {**STEP, (1, 1, "gradient", "w"): [1 / 3, 2 / 3]}
    assert compare_runs(record(changed, in_float32=exact, precision="bfloat16")).verdict == "rounding"
    assert ordered[3:] == in_float32
    found = compare_runs(record(changed, in_float32=exact, fails="switched, in float32", precision="bfloat16"))
    assert found.not_compared == ["in float32: RuntimeError: it needs bfloat16"]
    assert ordered[3:] == in_float32  # the first of them shows how far rounding reaches
    found = compare_runs(record(changed, fails="plain, in float32", precision="bfloat16"))
    assert found.not_compared == ["in float32: RuntimeError: it needs bfloat16"]
    assert ordered[3:] == [in_float32[0], ("plain, rounded once", "bfloat16")]
    assert compare_runs(record(STEP, again=changed)).verdict == "not repeatable"
    assert ordered == [("plain", None), ("switched", None), ("plain again", None)]


def test_gradients_of_zero_prove_nothing() -> None:
    runs = [recording({**STEP, (1, 1, "gradient", "w"): [0.0, 0.0]}) for _ in range(2)]
    found = compare(*runs)
    assert found.verdict == "equal"
    assert found.not_compared == ["gradients: all of them are zero or not finite, which proves nothing"]
