"""The recorder by itself: where steps end, what counts as a forward pass, and how tensors are named."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from exact_steps import WIDTH, batches, tiny_net
from torch import nn
from trained_toys import Training, network

from hf_memopt.exactness.recorder import Recorder, RecordingEnds
from hf_memopt.exactness.recording import Phase
from hf_memopt.memory.device_counters import peak_bytes


def names(recorder: Recorder, phase: Phase, step: int = 1) -> list[str]:
    return [place.name for place in recorder.recording.tensors if place.phase == phase and place.step == step]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_updates: int, micro_batches: int = 1) -> None:
    for _ in range(num_updates):
        for _ in range(micro_batches):
            model(batches()[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_recording_ends_with_the_first_forward_pass_after_the_last_update() -> None:
    model = tiny_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RecordingEnds), Recorder(2) as recorder:
        train(model, optimizer, 5, micro_batches=3)
    found = recorder.recording
    assert found.num_steps == 2
    assert len(found.step_s) == 2
    assert len([place for place in found.tensors if place.phase == "loss"]) == 6
    assert (found.peak_bytes is None) is (peak_bytes(torch.device("cpu")) is None)


def test_a_program_that_ends_with_its_last_update_is_recorded_whole() -> None:
    model = tiny_net()
    with Recorder(2) as recorder:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert names(recorder, "weight", 2) == names(recorder, "weight", 1) == names(recorder, "start", 0)
    assert (recorder.recording.peak_bytes is None) is (peak_bytes(torch.device("cpu")) is None)


def test_weights_that_stream_are_recorded_when_the_program_ends() -> None:
    found = []
    for home in ("", "host"):
        training = Training(network(), home).start()
        with Recorder(2) as recorder:
            training.run(2)
        tensors = recorder.recording.tensors.items()
        found.append({place: each for place, each in tensors if place.phase == "weight" and place.step == 2})
    assert found[0]
    assert found[1] == found[0]


def exit_after_training() -> None:
    model = tiny_net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    raise SystemExit(3)


def test_a_program_that_exits_keeps_its_status() -> None:
    recorder = Recorder(2)
    with pytest.raises(SystemExit) as end, recorder:
        exit_after_training()
    assert end.value.code == 3
    assert recorder.recording.num_steps == 2


def test_no_handler_of_exceptions_stops_the_end() -> None:
    model = tiny_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def stubborn() -> None:
        try:
            train(model, optimizer, 3)
        except Exception:
            pytest.fail("the program has caught the end of the recording")

    with pytest.raises(RecordingEnds), Recorder(1):
        stubborn()


def test_gradients_are_in_the_order_of_backward() -> None:
    with Recorder() as recorder:
        tiny_net()(batches()[0]).sum().backward()
    assert names(recorder, "gradient") == ["3.bias", "3.weight", "0.bias", "0.weight"]
    assert names(recorder, "loss") == ["loss"]
    assert names(recorder, "input") == ["[0]"]


def test_names_have_no_wrappers() -> None:
    class Wrapper(nn.Module):
        def __init__(self, name: str, model: nn.Module) -> None:
            super().__init__()
            self.add_module(name, model)
            self.inside = name

        def forward(self, x: Any) -> Any:
            return self.get_submodule(self.inside)(x)

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Wrapper("_checkpoint_wrapped_module", nn.Linear(WIDTH, WIDTH)))
    with Recorder() as recorder:
        Wrapper("module", Wrapper("_orig_mod", layers))(batches()[0]).sum().backward()
    assert names(recorder, "start", 0) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_buffers_count_and_frozen_weights_do_not() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4).requires_grad_(False), nn.BatchNorm1d(4))
    with Recorder() as recorder:
        model(batches()[0]).sum().backward()
        recorder.end_step()
    assert names(recorder, "weight") == [
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]


def test_models_without_anything_to_train_are_passed_by() -> None:
    frozen, model = tiny_net().requires_grad_(False), nn.Linear(WIDTH, WIDTH)
    with Recorder() as recorder:
        nn.MSELoss()(model(frozen(batches()[0])), batches()[1]).backward()
    assert names(recorder, "input") == ["[0]"]
    assert names(recorder, "start", 0) == ["weight", "bias"]


def test_inputs_are_named_by_path_model_and_call() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.linear(args[0])

    first, second = Model(), Model()
    x = batches()[0]
    with Recorder() as recorder:
        (first(x, mask={"deep": [x]}) + first(x) + second(x)).sum().backward()
        first(x).sum().backward()
    assert names(recorder, "input") == ["[0]", "mask.deep[0]", "[0] (call 2)", "[0] (model 2)", "[0]"]


def test_states_of_the_optimizer_are_named_after_weights() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    outside = nn.Parameter(torch.ones(WIDTH))
    optimizer = torch.optim.Adam([*model.parameters(), outside])
    with Recorder() as recorder:
        (model(batches()[0]) * outside).sum().backward()
        optimizer.step()
    states = ["step", "exp_avg", "exp_avg_sq"]
    owners = ["weight", "parameter 1 of optimizer 1"]
    assert names(recorder, "optimizer") == [f"{state} of {owner}" for owner in owners for state in states]


def test_an_optimizer_that_runs_its_own_passes() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batches()[0]).square().mean()
        loss.backward()
        return loss

    with Recorder() as recorder:
        optimizer.step(closure)
    assert len(names(recorder, "loss")) > 1
    assert names(recorder, "weight") == ["weight", "bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_a_rounding_changes_each_weight_by_one_unit_of_the_coarser_dtype(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 64, dtype=dtype)
    before = model.weight.detach().clone()
    with Recorder(perturbed="float32"):
        model(torch.ones(1, 64, dtype=dtype)).abs().sum().backward()
    change = (model.weight.detach() - before).abs() / before.abs()
    eps = max(torch.finfo(torch.float32).eps, torch.finfo(dtype).eps)
    assert (change > 0).float().mean() > 0.99
    assert 0.4 * eps < change.nan_to_num(0).max() < 2.1 * eps
    signs = (model.weight.detach() / before).abs() > 1
    assert 0.4 < signs.float().mean() < 0.6


def test_the_start_is_recorded_after_it_is_rounded() -> None:
    model = tiny_net()
    with Recorder() as plain:
        model(batches()[0]).sum().backward()
    with Recorder(perturbed="float32") as rounded:
        model(batches()[0]).sum().backward()
    starts = [
        [found for place, found in each.recording.tensors.items() if place.phase == "start"]
        for each in (plain, rounded)
    ]
    changes = [ours.relative(theirs) / torch.finfo(torch.float32).eps for ours, theirs in zip(*starts, strict=True)]
    assert all(0.5 < change < 2 for change in changes)


@pytest.mark.parametrize("through", ["weight", "data"])
def test_updates_by_hand_end_steps(through: str) -> None:
    model, outside = tiny_net(), torch.ones(WIDTH, requires_grad=True)

    def update() -> None:
        for each in (*model.parameters(), outside):
            assert each.grad is not None
            with torch.no_grad():
                (each if through == "weight" else each.data).sub_(0.1 * each.grad)
            each.grad = None

    def train_by_hand() -> None:
        for _ in range(5):
            for _ in range(3):
                (model(batches()[0]) * outside).square().mean().backward()
            update()

    with pytest.raises(RecordingEnds), Recorder(2) as recorder:
        train_by_hand()
    assert recorder.recording.num_steps == 2
    assert names(recorder, "loss", 2) == ["loss"] * 3


def test_the_last_update_by_hand_is_recorded() -> None:
    weight = torch.ones(WIDTH, requires_grad=True)
    with Recorder() as recorder:
        for _ in range(2):
            weight.square().sum().backward()
            weight.data.sub_(weight.grad)
            weight.grad = None
    assert [place.step for place in recorder.recording.tensors if place.phase == "loss"] == [1, 2]


def test_settings_are_those_of_the_update() -> None:
    model = tiny_net()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[3].weight, "lr": 0.5}], lr=0.1)
    with Recorder() as recorder:
        train(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] *= 0.5
        train(model, optimizer, 1)
    found = {str(place): each.value for place, each in recorder.recording.tensors.items() if place.phase == "setting"}
    assert found["lr of 0.bias in step 1"] == pytest.approx(0.1)
    assert found["lr of 0.bias in step 2"] == pytest.approx(0.05)
    assert found["lr of 3.weight in step 2"] == 0.5
    assert found["betas[1] of 3.weight in step 1"] == pytest.approx(0.999)
    assert not any("foreach" in place or "3.bias" in place for place in found)


@pytest.fixture(params=["older", "newer"])
def tf32(request: pytest.FixtureRequest) -> Iterator[str]:
    """TF32 for matrix products, by one of torch's two settings, which do not go together."""
    backends: Any = torch.backends
    products = backends.cuda.matmul, backends.mkldnn.matmul
    before = [each.fp32_precision for each in products]
    if request.param == "older":
        torch.set_float32_matmul_precision("high")
    else:
        products[1].fp32_precision = "tf32"
    yield request.param
    torch.set_float32_matmul_precision("highest")
    for each, found in zip(products, before, strict=True):
        each.fp32_precision = found


def test_float32_is_that_of_all_regions(tf32: str) -> None:
    model, backend = nn.Linear(64, 64), torch.backends.mkldnn.matmul
    found = []
    for in_float32 in (False, True):
        with Recorder(in_float32=in_float32) as recorder:
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(1, 64)).float().square().sum().backward()
            found.append(backend.fp32_precision)
            if tf32 == "older":  # as compilers read it
                assert torch.backends.cuda.matmul.allow_tf32 == (not in_float32)
                assert torch.get_float32_matmul_precision() == ("highest" if in_float32 else "high")
        assert backend.fp32_precision == "tf32"
        assert tf32 == "newer" or torch.backends.cuda.matmul.allow_tf32
        gradients = [each for place, each in recorder.recording.tensors.items() if place.phase == "gradient"]
        assert {each.num_bits > 11 for each in gradients} == {in_float32}
        assert recorder.recording.precision == "bfloat16"
        model.zero_grad()
    assert found == ["tf32", "ieee"]


def test_tf32_is_a_lower_precision(tf32: str) -> None:
    with Recorder() as recorder:
        nn.Linear(4, 4)(torch.ones(1, 4)).sum().backward()
    assert recorder.recording.precision == "float16"


def test_a_layer_that_is_frozen_after_a_pass_without_a_graph() -> None:
    model = tiny_net()
    with Recorder() as recorder:
        with torch.no_grad():
            model(batches()[0])
        model[0].requires_grad_(False)
        model.register_buffer("more", torch.ones(1))
        model(batches()[0]).sum().backward()
    assert names(recorder, "start", 0) == ["3.weight", "3.bias"]
