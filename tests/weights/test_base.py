"""Tests of frozen weights that visit the device in forward and backward."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier, InjectedError
from frozen_bases import (
    LAYER_BYTES,
    MODES,
    ROWS,
    WIDTH,
    AdaptedLinear,
    adapted,
    default_device,
    ids,
    same,
    square_loss,
    streamed,
    train,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from hf_memopt import ActivationOffloader, StreamedWeights, SyncCopier
from hf_memopt.transfer.storage_memory import WholePages
from hf_memopt.units import GIB
from hf_memopt.weights.base import streamed_weights_of
from hf_memopt.weights.residency.backward_visits import BackwardVisit


@pytest.mark.parametrize("schedule", ["early", "late", "random"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
def test_gradients_are_those_of_the_resident_run(checkpointing: str, autocast: bool, schedule: str) -> None:
    loss = partial(square_loss, autocast=autocast)
    want = train(adapted(checkpointing), loss)
    model = adapted(checkpointing)
    base = streamed(model, copier=AdversarialCopier(schedule))
    assert same(train(model, loss, base), want)
    assert base.report().device_bytes == 0


@pytest.mark.parametrize("budget_gib", [None, 6 * LAYER_BYTES / GIB, 1.0])
def test_weights_come_from_files(budget_gib: float | None, tmp_path: Path) -> None:
    want = train(adapted(), square_loss)
    model = adapted()
    base = streamed(model, home="file", budget_gib=budget_gib, disk=tmp_path)
    assert same(train(model, square_loss, base), want)
    report = base.report()
    assert report.bytes_read > 0
    assert report.host_bytes == 0 or not WholePages.are_available()
    assert not list(tmp_path.iterdir())  # the file has no name


def test_device_memory_is_that_of_two_visits() -> None:
    model = adapted()
    for parameter in model.head.parameters():
        parameter.requires_grad_(True)  # as large as all layers
    base = streamed(model)
    train(model, square_loss, base)
    report = base.report()
    assert report.peak_device_bytes == 2 * LAYER_BYTES
    assert report.streamed_bytes == (ROWS * WIDTH + 5 * WIDTH * WIDTH) * 4


def test_each_weight_is_brought_once_in_each_pass() -> None:
    model = adapted()
    base = streamed(model)
    train(model, square_loss, base, steps=2)
    before = base.report().bytes_to_device
    train(model, square_loss, base, steps=1)
    head, layers = ROWS * WIDTH * 4, 5 * LAYER_BYTES
    # The head's backward comes right after its forward, and then the last layer's, which is kept beside it. The first
    # layer's weight is not needed in backward.
    assert base.report().bytes_to_device - before == head + layers + 3 * LAYER_BYTES
    assert base.report().smallest_budget_bytes == head + LAYER_BYTES


def test_the_last_layers_are_kept_at_the_turn_to_backward() -> None:
    model = adapted()
    for parameter in model.head.parameters():
        parameter.requires_grad_(True)
    base = streamed(model)
    train(model, square_loss, base, steps=2)
    before = base.report().bytes_to_device
    train(model, square_loss, base, steps=1)
    # Two layers have room: both are there when backward begins.
    assert base.report().bytes_to_device - before == 5 * LAYER_BYTES + 2 * LAYER_BYTES
    assert base.report().peak_device_bytes == 2 * LAYER_BYTES


def test_a_budget_keeps_weights_on_the_device() -> None:
    model = adapted()
    head = ROWS * WIDTH * 4
    base = streamed(model, budget_gib=(2 * head + 2 * LAYER_BYTES) / GIB)
    train(model, square_loss, base, steps=4)
    report = base.report()
    # All fit: the table is looked up at home.
    assert report.resident == {"within the budget": head + 5 * LAYER_BYTES}
    names = report.names["within the budget"]
    assert set(names) == {*(f"layers.{number}.base.weight" for number in range(5)), "head.weight"}
    assert f"within the budget: {names[0]} and 5 more" in str(report)
    assert report.device_bytes == report.peak_device_bytes == head + 5 * LAYER_BYTES
    assert report.smallest_budget_bytes == head + LAYER_BYTES


def test_backward_may_run_twice_and_inside_the_context() -> None:
    def run(model: nn.Module, base: StreamedWeights | None) -> Tensor:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
        layers = nn.Sequential(*model.layers)
        for _ in range(2):
            if base is None:
                loss = (layers(x).sin() + layers(x).cos()).sum()
            else:
                with base.stream():
                    loss = (layers(x).sin() + layers(x).cos()).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return x.grad

    want = run(adapted(), None)
    model = adapted()
    base = streamed(model, copier=AdversarialCopier("late"))
    assert torch.equal(run(model, base), want)
    assert base.report().device_bytes == 0


def test_a_graph_of_gradients_reads_the_weights_too() -> None:
    def run(model: nn.Module, base: StreamedWeights | None) -> list[Tensor]:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
        layers = nn.Sequential(*model.layers)
        found = []
        for _ in range(2):
            if base is None:
                y = layers(x).tanh().sum()
            else:
                with base.stream():
                    y = layers(x).tanh().sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            found += torch.autograd.grad(gradient.square().sum(), [x, *model.layers[0].up.parameters()])
        return found

    want = run(adapted(), None)
    model = adapted()
    base = streamed(model, copier=AdversarialCopier("late"))
    assert same(run(model, base), want)
    with base.stream():
        assert base.report().device_bytes == 0


@pytest.mark.parametrize("mode", ["all", "auto"])
def test_activations_may_be_offloaded_beside(mode: str) -> None:
    def loss(model: nn.Module, offloader: ActivationOffloader | None = None) -> Tensor:
        if offloader is None:
            return square_loss(model)
        with offloader.offload_context(model):
            return square_loss(model)

    want = train(adapted(), loss, steps=4)
    model = adapted()
    options = {"budget_gib": 1.2e-4} if mode == "auto" else {}
    offloader = ActivationOffloader(mode=mode, copier=SyncCopier(), offload_threshold_mb=0.0001, **options)
    base = streamed(model, copier=AdversarialCopier("late"))
    assert same(train(model, partial(loss, offloader=offloader), base, steps=4), want)
    assert offloader.stats.bytes_moved > 0
    assert offloader.stats.bytes_weights > 0


def test_a_model_may_be_called_outside_of_the_context() -> None:
    model, plain = adapted(), adapted()
    streamed(model)
    with torch.no_grad():
        assert torch.equal(model(ids()), plain(ids()))
    assert same(train(model, square_loss), train(plain, square_loss))


def test_tied_weights_stream_once() -> None:
    def tied() -> nn.Module:
        model = adapted()
        model.head.weight = model.table.weight
        return model

    want = train(tied(), square_loss)
    model = tied()
    base = streamed(model, copier=AdversarialCopier("late"))
    assert same(train(model, square_loss, base), want)
    assert base.report().streamed_bytes == (ROWS * WIDTH + 5 * WIDTH * WIDTH) * 4


class ReadsElsewhere(nn.Module):
    """Reads a frozen weight without calling its module, inside another module or in the loss."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.other = AdaptedLinear(), AdaptedLinear()
        self._where = where

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.other(self.layer(x)))
        return y @ self.layer.base.weight if self._where == "module" else y


@pytest.mark.parametrize("where", ["module", "loss"])
def test_weights_may_be_read_without_their_module(where: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return ReadsElsewhere(where)

    def loss(model: Any) -> Tensor:
        y = model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)))
        return (y if where == "module" else y @ model.layer.base.weight).square().sum()

    want = train(make(), loss)
    model = make()
    base = streamed(model, copier=AdversarialCopier("late"))
    assert same(train(model, loss, base), want)
    with base.stream():
        assert base.report().device_bytes == 0
        assert base.report().resident == {}


def test_only_experts_that_are_called_are_brought() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(AdaptedLinear() for _ in range(8))

        def forward(self, x: Tensor, chosen: int) -> Tensor:
            return self.experts[chosen](x)

    model = Experts()
    base = streamed(model)
    x = torch.randn(3, WIDTH)
    for chosen, experts in [(2, 1), (2, 2), (5, 3)]:
        with base.stream():
            loss = model(x, chosen).sum()
        loss.backward()  # x has no gradient, so that backward needs no weight
        # The third pass fetches nothing that it does not call: the second one's expert comes in its own visit.
        assert base.report().bytes_to_device == experts * LAYER_BYTES


def test_nothing_is_left_of_a_step_and_of_a_model() -> None:
    model = adapted()
    base = streamed(model)
    train(model, square_loss, base, steps=2)
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, BackwardVisit)]
    storage = StorageWeakRef(base._visiting.found[1].present[0].untyped_storage())
    assert not storage.expired()
    del model, base
    gc.collect()
    assert storage.expired()


def test_a_weight_that_its_module_returns_stays() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.weight[: x.shape[0]]

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.layer = Positions(), AdaptedLinear()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x)) * self.positions(x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Added()

    def loss(model: nn.Module) -> Tensor:
        return model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))).square().sum()

    want = train(make(), loss)
    model = make()
    base = streamed(model, copier=AdversarialCopier("late"))
    assert same(train(model, loss, base), want)
    assert base.report().resident == {"returned by its module": LAYER_BYTES}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's
@pytest.mark.parametrize("what", ["layers", "model"])
@pytest.mark.sweep(share=0.5)
def test_compiled_modules(what: str) -> None:
    def compiled(model: Any) -> Any:
        for module in model.layers if what == "layers" else [model]:
            module.compile(backend="aot_eager")
        return model

    want = train(compiled(adapted()), square_loss)
    model = adapted()
    if what == "layers":
        compiled(model)
    base = streamed(model, copier=AdversarialCopier("late"))
    if what == "model":
        compiled(model)
    assert same(train(model, square_loss, base), want)
    assert base.report().peak_device_bytes < base.report().streamed_bytes


def test_a_model_compiled_as_one_region_is_refused() -> None:
    with pytest.raises(ValueError, match="compile its layers instead"):
        streamed(torch.compile(adapted(), backend="aot_eager"))


class ProductWith(torch.autograd.Function):
    """Has gradients off in its forward, as all custom functions do, and reads the weight again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.weight.t(), None


class WithProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = adapted()

    def forward(self, x: Tensor) -> Tensor:
        return ProductWith.apply(torch.tanh(nn.Sequential(*self.inner.layers)(x)), self.inner.head.weight.t())


def test_a_custom_function_may_read_the_weight_of_another_module() -> None:
    def loss(model: nn.Module) -> Tensor:
        return model(torch.ones(2, WIDTH)).square().mean()

    want = train(WithProduct(), loss)
    model = WithProduct()
    base = streamed(model, copier=AdversarialCopier("late"))
    assert same(train(model, loss, base), want)
    assert base.report().resident == {}


def test_a_layer_with_several_readers_of_its_input_keeps_the_rounding() -> None:
    """A view of the input would have gradients added up in another order."""

    class TwoReads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * x.square().mean(-1, keepdim=True).rsqrt() @ self.weight * self.scale

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.block = TwoReads()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.block(x) + x

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Residual()

    def loss(model: nn.Module) -> Tensor:
        return model(torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(0))).square().sum() / 1e4

    want = train(make(), loss)
    model = make()
    assert same(train(model, loss, streamed(model)), want)


def test_a_state_dict_has_the_weights() -> None:
    model = adapted()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    base = streamed(model)
    for _ in range(2):
        got = model.state_dict()
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], value) for name, value in want.items())
        train(model, square_loss, base, steps=1)
        want |= {name: value.clone() for name, value in model.state_dict().items() if "base" not in name}


def replace_weight(model: Any) -> None:
    model.layers[2].base.weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)


def cast_weight(model: Any) -> None:
    model.layers[1].base.weight.data = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)


def write_weight(model: Any) -> None:
    with pytest.raises(RuntimeError, match=r"layers\.3\.base\.weight' was written"):
        with streamed_weights_of(model).visit(model.layers[3]):
            model.layers[3].base.weight.mul_(2)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda model: model.layers[0].base.requires_grad_(True), "layers.0.base.weight' requires a gradient"),
        (cast_weight, "layers.1.base.weight' was written, cast or moved"),
        (write_weight, "layers.3.base.weight' was written, cast or moved"),
        (replace_weight, "layers.2.base.weight' was replaced"),
    ],
    ids=["unfrozen", "cast", "written", "replaced"],
)
def test_changed_weights_are_found_out(act: Callable[[nn.Module], object], error: str) -> None:
    model = adapted()
    base = streamed(model)
    act(model)
    with pytest.raises(RuntimeError, match=error), base.stream():
        raise AssertionError("not found out")


def doubled(model: nn.Module) -> dict[str, Tensor]:
    return {name: 2 * value for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda model: model.load_state_dict(doubled(adapted())), "table.weight' cannot be loaded"),
        (lambda model: copy.deepcopy(model), "table.weight' cannot be copied"),
        (lambda model: pickle.dumps(model.layers[0].base.weight), "layers.0.base.weight' cannot be copied"),
        (lambda model: torch.save(model, io.BytesIO()), "table.weight' cannot be copied"),
    ],
    ids=["loaded", "copied", "pickled", "saved"],
)
def test_placeholders_are_not_taken_for_weights(act: Callable[[nn.Module], object], error: str) -> None:
    model = adapted()
    streamed(model)
    with pytest.raises(RuntimeError, match=error):
        act(model)


def test_adapters_load_while_the_base_streams() -> None:
    model = adapted()
    streamed(model)
    loaded = adapted().state_dict()
    loaded |= {name: 2 * value for name, value in loaded.items() if "up" in name}
    model.load_state_dict(loaded)
    adapters = {name: value for name, value in loaded.items() if "up" in name or "down" in name}
    model.load_state_dict(adapters, strict=False)
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def test_a_checkpoint_with_the_same_base_loads_while_it_streams() -> None:
    model, other = adapted(), adapted()
    train(other, square_loss, steps=1)
    base = streamed(model)
    for _ in range(2):
        loaded = model.load_state_dict(other.state_dict())
        assert not [*loaded.missing_keys, *loaded.unexpected_keys]
    assert model.load_state_dict({}, strict=False).missing_keys == list(model.state_dict())
    assert same(train(model, square_loss, base), train(other, square_loss))


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sweep(share=0.15)
def test_weights_that_begin_to_stream_in_any_mode_train_the_same(mode: str, home: str, tmp_path: Path) -> None:
    model = adapted()
    with MODES[mode]():
        with pytest.raises(ValueError, match="safetensors"):
            streamed(model, home="file", files=[tmp_path])
        base = streamed(model, home=home, disk=tmp_path)
    assert same(train(model, square_loss, base), train(adapted(), square_loss))


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_default_device_may_stay_set(home: str, tmp_path: Path) -> None:
    tokens = ids()

    def loss(model: nn.Module) -> Tensor:
        return model(tokens).square().mean()

    model, plain = adapted(), adapted()
    want = train(plain, loss)
    with default_device("meta"):
        base = streamed(model, home=home, disk=tmp_path)
        assert same(train(model, loss, base), want)
        with pytest.raises(IndexError), base.stream():
            model(tokens + ROWS)
        base.remove()
    assert same([*model.parameters()], [*plain.parameters()])


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.sweep(share=0.4)
def test_training_after_an_evaluation_in_inference_mode(autocast: bool, home: str, tmp_path: Path) -> None:
    loss = partial(square_loss, autocast=autocast)
    model = adapted()
    base = streamed(model, home=home, disk=tmp_path)
    with torch.inference_mode(), base.stream():
        loss(model)
    assert same(train(model, loss, base), train(adapted(), loss))


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = adapted()
    with pytest.raises(ValueError, match=r"'table\.weight' was made in torch\.inference_mode\(\)"):
        streamed(model)


def test_a_model_streams_once_and_knows_by_what() -> None:
    model = adapted()
    base = streamed(model)
    outer = nn.Sequential(model)
    assert streamed_weights_of(model) is streamed_weights_of(outer) is base
    with pytest.raises(ValueError, match=r"'0.table.weight' streams already; use that StreamedWeights"):
        streamed(outer)
    base.remove()
    assert streamed_weights_of(outer) is None
    streamed(model)


def test_an_offloader_may_be_entered_inside() -> None:
    model = adapted()
    base = streamed(model)
    offloader = ActivationOffloader(mode="all", copier=SyncCopier())
    with base.stream(), offloader.offload_context(model):
        model(ids()).sum().backward()
    assert base.report().resident == {}


class TwoWays(nn.Module):
    """A module that reads the weight of another one, on one of its ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: Tensor, itself: bool) -> Tensor:
        return nn.functional.linear(x, self.layer.weight) if itself else self.layer(x)


class ReadsAnother(nn.Module):
    """A module that reads the weight of another one, and calls layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.rest = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(nn.functional.linear(self.first(x), self.other.weight).tanh())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_passes_may_begin_before_the_backward_of_others(order: tuple[int, int]) -> None:
    def gradients(model: ReadsAnother, context: Callable[[], Any]) -> list[Tensor]:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
        losses = []
        for scale in (1, 2):
            with context():
                losses.append(model(scale * x).square().mean())
        with context(), torch.no_grad():
            model(x)
        return [torch.autograd.grad(losses[number], model.first.weight)[0] for number in order]

    plain, model = ReadsAnother(), ReadsAnother()
    base = streamed(model, copier=AdversarialCopier("late"))
    for _ in range(3):
        assert same(gradients(model, base.stream), gradients(plain, nullcontext))
    with base.stream():
        assert base.report().device_bytes == 0


def test_each_way_through_a_model_is_learned_by_itself() -> None:
    model, plain, x = TwoWays(), TwoWays(), torch.randn(2, WIDTH)
    base = streamed(model)
    for itself in (False, True, False, True):
        with base.stream(f"{itself=}"), torch.no_grad():
            assert torch.equal(model(x, itself), plain(x, itself))


def test_remove_gives_ordinary_parameters_back() -> None:
    model, plain = adapted(), adapted()
    base = streamed(model)
    train(model, square_loss, base, steps=1)
    train(plain, square_loss, steps=1)
    base.remove()
    base.remove()
    assert same([*model.parameters()], [*plain.parameters()])
    assert same(train(model, square_loss), train(plain, square_loss))
    copy.deepcopy(model).load_state_dict(plain.state_dict())
    assert base.report().device_bytes == base.report().streamed_bytes


def test_parameters_given_back_are_trained_by_ddp_as_others_are() -> None:
    model: Any = adapted()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["table.weight"])
    base = streamed(model)
    assert "head.weight" in model._ddp_params_and_buffers_to_ignore
    base.remove()
    assert model._ddp_params_and_buffers_to_ignore == ["table.weight"]
    assert [name for name, each in model.named_parameters() if hasattr(each, "_ddp_ignored")] == ["table.weight"]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.sweep(share=0.5)
def test_every_operation_may_fail(steps: int) -> None:
    """The error is raised, and the next step is right."""
    counted = AdversarialCopier("late")
    model = adapted()
    train(model, square_loss, streamed(model, copier=counted), steps=steps)
    plain = adapted()
    want = train(plain, square_loss, steps=1)
    for number in range(1, counted.num_operations + 1, 3):
        model = adapted()
        try:
            base = streamed(model, copier=AdversarialCopier("late", fail_at=number))
        except InjectedError:
            continue
        with pytest.raises(InjectedError):
            train(model, square_loss, base, steps=steps)
        for mine, its in zip(model.parameters(), adapted().parameters(), strict=True):
            if mine.requires_grad:
                mine.grad, mine.data = None, its.data
        assert same(train(model, square_loss, base, steps=1), want)
        assert base.report().device_bytes == 0


def test_an_exception_in_forward_leaves_nothing() -> None:
    model = adapted()
    base = streamed(model)
    with pytest.raises(IndexError), base.stream():
        model(torch.tensor([[ROWS]]))
    handle = model.layers[3].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), base.stream():
        model(ids())
    handle.remove()
    assert same(train(model, square_loss, base), train(adapted(), square_loss))


def test_a_file_that_changes_is_found_out(tmp_path: Path) -> None:
    from teacher_files import checkpoint as saved

    model = adapted()
    file = saved(model, tmp_path)
    base = streamed(model, home="file", files=[file])
    train(model, square_loss, base, steps=1)
    with file.open("r+b") as opened:
        opened.seek(-8, io.SEEK_END)
        opened.write(b"changed!")
    with pytest.raises(OSError, match="changed after it was opened"), base.stream():
        pass


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"home": "cloud"}, "home='cloud' is unknown; use one of auto, host, file"),
        ({"budget_gib": -1.0}, "budget_gib"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        StreamedWeights(adapted(), device="cpu", **options)


def test_a_model_without_frozen_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="no frozen weights"):
        streamed(nn.Linear(3, 3))


def test_a_model_on_several_devices_is_refused() -> None:
    model: Any = adapted()
    model.hf_device_map = {"table": 0, "layers": "cpu"}
    with pytest.raises(ValueError, match="2 devices by its device_map"):
        streamed(model)


def test_small_weights_stay() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
            self.layers = nn.Sequential(*(AdaptedLinear() for _ in range(8)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(self.norm(x))

    model = Normed()
    base = streamed(model)
    assert base.report().resident == {"small": 2 * WIDTH * 4}
    assert not model.norm.weight.isnan().any()


def test_auto_takes_files_where_host_memory_is_the_devices_own() -> None:
    assert streamed(adapted(), home="auto").report().home == "file"


def test_a_report_prints() -> None:
    model = adapted()
    base = streamed(model)
    train(model, square_loss, base, steps=1)
    assert "stream from host memory to cpu" in str(base.report())
