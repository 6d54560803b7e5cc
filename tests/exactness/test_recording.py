"""Recordings: written, read, and their places in words."""

import dataclasses
from pathlib import Path

import pytest
import torch
from exact_steps import Training, batches, tiny_net

from hf_memopt.exactness.recorder import Recorder
from hf_memopt.exactness.recording import PHASES, Fingerprint, Phase, Recording, TensorPlace


def recorded() -> Recording:
    training = Training(autocast=True)
    with Recorder() as recorder:
        training()
        recorder.add_results({"loss": torch.tensor(2.5), "scores": [torch.tensor([1.0, float("nan")])]})
        recorder.end_step()
        training()
    return recorder.recording


def test_what_is_written_is_read(tmp_path: Path) -> None:
    before = recorded()
    before.not_deterministic.append("put_")
    before.write(tmp_path / "rank-0.json")
    found = Recording.read(tmp_path / "rank-0.json")
    assert found == before
    assert list(found.tensors) == list(before.tensors)
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0.json"]
    assert {place.phase for place in found.tensors} == set(PHASES)


def test_a_recording_tells_precision_steps_and_cost() -> None:
    found = recorded()
    assert found.precision == "bfloat16"
    assert found.has_dropout
    assert found.num_steps == 2
    assert len(found.step_s) == 2
    assert min(found.step_s) > 0
    assert found.recording_s > 0
    assert found.peak_bytes is None or found.peak_bytes > 2**20


def test_an_empty_recording_has_no_steps() -> None:
    assert Recording().num_steps == 0


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (TensorPlace(0, 0, "start", "0.weight"), "0.weight before the first step"),
        (TensorPlace(1, 2, "input", "[0]"), "input [0] of micro-batch 2 of step 1"),
        (TensorPlace(1, 1, "loss", "loss 2"), "loss 2 of micro-batch 1 of step 1"),
        (TensorPlace(3, 2, "gradient", "0.bias"), "gradient of 0.bias after backward of micro-batch 2 of step 3"),
        (TensorPlace(1, 0, "gradient", "0.bias"), "gradient of 0.bias after backward of step 1"),
        (TensorPlace(2, 0, "result", ""), "result of step 2"),
        (TensorPlace(2, 0, "result", "loss"), "result loss of step 2"),
        (TensorPlace(2, 0, "result", "[1]"), "result [1] of step 2"),
        (TensorPlace(2, 0, "weight", "0.weight"), "0.weight after step 2"),
        (TensorPlace(2, 0, "optimizer", "exp_avg of 0.weight"), "optimizer state exp_avg of 0.weight after step 2"),
    ],
)
def test_a_place_in_words(place: TensorPlace, text: str) -> None:
    assert str(place) == text


def test_places_are_in_the_order_of_a_run() -> None:
    places = list(recorded().tensors)
    # Results come before the update, and are recorded when it has been made.
    assert [place.order for place in places] == sorted(place.order for place in places)


def test_the_tensor_before_another() -> None:
    def print_of(value: float) -> Fingerprint:
        return Fingerprint.of(torch.tensor(value))

    places: list[tuple[int, int, Phase]] = [(0, 0, "start"), (1, 1, "gradient"), (1, 2, "gradient"), (1, 0, "weight")]
    tensors = {TensorPlace(*place, "w"): print_of(number) for number, place in enumerate(places)}
    tensors[TensorPlace(2, 0, "weight", "w")] = print_of(9)
    found = Recording(tensors)
    first, *_, last = tensors
    for later, earlier in ((places[2], places[1]), (places[3], places[0])):
        assert found.before(TensorPlace(*later, "w")) is tensors[TensorPlace(*earlier, "w")]
    assert found.before(last) is tensors[TensorPlace(1, 0, "weight", "w")]
    assert found.before(TensorPlace(1, 1, "gradient", "w")) is None
    assert found.before(first) is None


def test_fingerprints_are_as_small_as_they_say() -> None:
    found = Fingerprint.of(torch.ones(2**21))
    assert len(str(dataclasses.astuple(found))) < 8000
    assert len(found.sketch) == 256


def test_models_in_evaluation_have_no_dropout() -> None:
    model = tiny_net().eval()
    with Recorder() as recorder:
        model(batches()[0]).sum().backward()
    assert not recorder.recording.has_dropout
