"""The report of `verify`: its text, and its JSON."""

import json
import math
from typing import Any

import pytest
import torch
from exact_steps import Training, batches, tiny_net
from torch import Tensor

from hf_memopt.exactness import VerifyReport, verify


def doubled(model: Any, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    output.register_hook(lambda gradient: gradient * 2)
    return output


def with_infinity(model: Any, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    output.register_hook(lambda gradient: gradient * math.inf)
    return output


def with_other_zeros(model: Any, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    output.register_hook(lambda gradient: gradient + 0.0)
    return output


@pytest.fixture(scope="module")
def different() -> VerifyReport:
    model = tiny_net()
    return verify(Training(model), Training(model, doubled))


def test_the_text_of_a_difference(different: VerifyReport) -> None:
    lines = str(different).splitlines()
    place = "gradient of 3.bias after backward of micro-batch 1 of step 1"
    assert lines[0] == f"different, not by rounding, first in {place}, after equal losses"
    assert lines[1].startswith("  relative 1, 8.39e+06 roundings of float32, ")
    assert lines[1].endswith(" times the change by one rounding of all weights")
    assert lines[2].startswith("  largest: ")
    assert lines[3].startswith("  differing: 0 of 4 weights at the start; 0 of 4 inputs; ")
    assert "16 of 16 gradients" in lines[3]
    assert lines[4].startswith("  look at: the gradient is 2 times the plain one")
    assert lines[5] == ""
    assert lines[6].split("  ")[0] == "run"
    assert [line.split("  ")[0] for line in lines[-4:]] == ["plain", "switched", "plain again", "plain, rounded once"]
    assert str(different).startswith(different.answer)


def test_a_report_is_the_message_of_an_assertion(different: VerifyReport) -> None:
    with pytest.raises(AssertionError, match=r"gradient of 3\.bias"):
        assert different.equal, different.answer


def test_the_json_has_everything_in_jsons_types(different: VerifyReport) -> None:
    found = json.loads(json.dumps(different.to_dict(), allow_nan=False))
    assert found["verdict"] == "different"
    assert found["equal"] is False
    assert found["losses_equal"] is True
    assert (found["num_steps"], found["num_gradients"]) == (2, 4)
    first = found["first"]
    assert (first["step"], first["micro_batch"], first["phase"], first["name"]) == (1, 1, "gradient", "3.bias")
    assert first["relative"] == pytest.approx(1)
    assert found["differing"]["gradient"] == 16
    assert found["compared"]["input"] == 4
    assert found["headline"] == different.headline
    assert {run["name"] for run in found["runs"]} == {"plain", "switched", "plain again", "plain, rounded once"}
    assert all(run["step_s"] > 0 and run["recording_s"] > 0 for run in found["runs"])


def test_numbers_that_json_has_not_are_text() -> None:
    model = tiny_net()
    report = verify(Training(model), Training(model, with_infinity))
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert json.loads(text)["first"]["relative"] == "inf"
    assert "whose elements are not finite" in str(report)
    # Both runs have them, and differ elsewhere.
    report = verify(Training(model, with_infinity), Training(model, with_infinity, order=(1, 0, 2, 3)))
    json.dumps(report.to_dict(), allow_nan=False)


def test_an_equal_report_as_json() -> None:
    found = verify(Training(), Training()).to_dict()
    assert (found["verdict"], found["first"], found["worst"]) == ("equal", None, None)
    json.dumps(found, allow_nan=False)


def test_a_single_value_is_shown() -> None:
    report = verify(lambda: torch.tensor(2.0), lambda: torch.tensor(3.0))
    assert "3 instead of 2: relative 0.5" in str(report)
    assert report.headline == "different, not by rounding, first in result of step 1"


def test_signs_of_zeros_are_named() -> None:
    report = verify(lambda: torch.zeros(3), lambda: -torch.zeros(3))
    assert not report.equal
    assert "signs of zeros" in str(report)


def test_a_difference_that_the_sketch_cannot_tell_is_not_called_one_of_signs() -> None:
    def step(small: float) -> Tensor:
        return torch.cat([torch.arange(1.0, 601.0) * 1e8, torch.tensor([small])]).double()

    report = verify(lambda: step(1e-30), lambda: step(2e-30))
    assert not report.equal
    assert "by bits below 1e-16 of its norm, or signs of zeros" in str(report)


def test_another_dtype_of_equal_values_is_named() -> None:
    report = verify(lambda: torch.ones(2), lambda: torch.ones(2, dtype=torch.bfloat16))
    assert "as bfloat16 instead of float32" in str(report)
    assert "the values are equal, but stored as bfloat16 instead of float32" in report.advice


def test_another_shape_is_named() -> None:
    report = verify(lambda: torch.ones(2), lambda: torch.ones(3))
    assert "of shape (3,) instead of (2,)" in str(report)


def test_one_gradient_and_one_step_are_singular() -> None:
    leaf = batches()[0].clone().requires_grad_()

    def step() -> None:
        leaf.grad = None
        leaf.sum().backward()

    assert verify(step, step, steps=1).headline == "equal, bit for bit, over 1 step and 1 gradient"
