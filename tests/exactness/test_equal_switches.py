"""Switches and models that keep every bit: `verify` has to say so, and to have compared what there is."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from exact_steps import WIDTH, Training, batches, tiny_net
from late_imports import LateModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader, SelectiveCheckpoint, SyncCopier
from hf_memopt.exactness import VerifyReport, verify
from hf_memopt.exactness.recorder import Recorder

dynamo = LateModule("torch._dynamo")
torchao_quantization = LateModule("torchao.quantization")
tensor_parallel = LateModule("torch.distributed.tensor")

Step = Callable[[], Any]


def offloaded(model: nn.Module, x: Tensor) -> Any:
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier())
    with offloader.offload_context(model):
        output = model(x)
    assert offloader.stats.bytes_moved > 0
    return output


def saved_on_cpu(model: nn.Module, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


def in_parts(model: Any, x: Tensor) -> Any:
    return checkpoint(model[2:], checkpoint(model[:2], x, use_reentrant=False), use_reentrant=False)


SWITCHES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "nothing": lambda model, x: model(x),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "checkpoint of parts": in_parts,
    "reentrant checkpoint": lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True),
    "selective checkpoint": lambda model, x: SelectiveCheckpoint()(model, x),
    "torch's save_on_cpu": saved_on_cpu,
    "offloading": offloaded,
}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.sweep(share=0.25)
def test_a_switch_that_keeps_every_bit(switch: str, autocast: bool) -> None:
    model = tiny_net()
    report = verify(Training(model, autocast=autocast), Training(model, SWITCHES[switch], autocast=autocast))
    assert report.equal, report
    assert report.headline == "equal, bit for bit, over 2 steps and 4 gradients"
    assert report.compared["gradient"] == 16
    assert report.compared["weight"] == 8
    assert report.compared["optimizer"] == 24
    assert report.compared["loss"] == 4
    assert report.differing == {}
    assert report.advice == ""
    assert [run.name for run in report.runs] == ["plain", "switched", "plain again"]


def test_a_model_of_its_own_has_the_same_names() -> None:
    model = tiny_net()
    report = verify(Training(model), Training(copy.deepcopy(model), SWITCHES["checkpoint"]))
    assert report.equal, report
    assert report.compared["gradient"] == 16


def equal(step: Step, other: Step | None = None) -> VerifyReport:
    report = verify(step, other or step)
    assert report.equal, report
    return report


def test_two_models_with_an_optimizer_each() -> None:
    generator, critic = nn.Linear(WIDTH, WIDTH), tiny_net(dropout=0.0)
    of_generator, of_critic = (torch.optim.Adam(each.parameters()) for each in (generator, critic))

    def step(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        made = generator(batches()[0])
        of_critic.zero_grad()
        (call(critic, made.detach()).mean() - call(critic, batches()[1]).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        call(critic, generator(batches()[2])).mean().neg().backward()
        of_generator.step()

    report = equal(lambda: step(SWITCHES["nothing"]), lambda: step(SWITCHES["checkpoint"]))
    assert report.num_gradients == 6
    assert report.num_steps == 4  # each update ends one


def test_recomputation_by_autograd_grad_is_no_forward_pass() -> None:
    class Critic(nn.Module):
        def __init__(self, layers: nn.Sequential, is_checkpointed: bool) -> None:
            super().__init__()
            self.layers, self.is_checkpointed = layers, is_checkpointed

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
            return x

    layers = tiny_net(dropout=0.0)
    plain, switched = Critic(layers, False), Critic(layers, True)

    def step(critic: nn.Module) -> None:
        x = batches()[0].requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        (critic(batches()[1]).mean() + critic(slope).mean()).backward()
        critic.zero_grad()

    report = equal(lambda: step(plain), lambda: step(switched))
    assert report.not_compared == []
    assert report.compared["input"] == 6


def test_a_model_whose_parts_are_called_first() -> None:
    model = tiny_net(dropout=0.0)

    def step() -> None:
        hidden = model[0](batches()[0])
        (model[3](hidden.relu()).mean() + model(batches()[1]).mean()).backward()
        model.zero_grad()

    assert equal(step).num_gradients == 4


class InHalves(nn.Linear):
    """Adds the products of two halves."""

    def forward(self, x: Tensor) -> Tensor:
        half = self.in_features // 2
        return x[:, half:] @ self.weight[:, half:].t() + x[:, :half] @ self.weight[:, :half].t() + self.bias


def test_rounding_in_a_part_is_no_other_data_for_the_next_one() -> None:
    first, second = nn.Linear(1024, WIDTH), nn.Linear(WIDTH, WIDTH)
    x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0))

    def step(kind: type[nn.Linear]) -> None:
        first.__class__ = kind
        second(first(x)).square().mean().backward()
        first.zero_grad()
        second.zero_grad()

    report = verify(lambda: step(nn.Linear), lambda: step(InHalves))
    assert report.verdict == "rounding", report
    assert report.differing["input"] == 2


def test_weights_that_are_read_without_a_call_of_their_module() -> None:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def step(call: Callable[[Tensor], Tensor]) -> None:
        second(call(batches()[0])).square().mean().backward()
        first.zero_grad()
        second.zero_grad()

    report = equal(lambda: step(first), lambda: step(lambda x: nn.functional.linear(x, first.weight, first.bias)))
    assert report.compared["gradient"] == 8
    assert report.compared["start"] == 4


CHECKPOINTED = {
    "plain": lambda function, x: function(x),
    "checkpoint": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "reentrant": lambda function, x: checkpoint(function, x.requires_grad_(), use_reentrant=True),
}


@pytest.mark.parametrize("how", CHECKPOINTED)
def test_leaves_outside_of_modules(how: str) -> None:
    first, second = (batches()[i, :, :8].clone().requires_grad_() for i in range(2))

    def step(call: Callable[[Any, Tensor], Tensor]) -> None:
        first.grad = second.grad = None
        call(lambda x: (x.t() @ first).tanh() @ second.t(), batches()[2]).square().sum().backward()

    assert equal(lambda: step(CHECKPOINTED["plain"]), lambda: step(CHECKPOINTED[how])).num_gradients == 2


def test_leaves_that_each_step_makes() -> None:
    lasting = batches()[0, :, :8].clone().requires_grad_()

    def step() -> None:
        fresh = batches()[1].requires_grad_()
        (fresh.t() @ lasting).sum().backward()

    assert equal(step).num_gradients == 2


def test_inputs_that_have_gradients() -> None:
    model = tiny_net(dropout=0.0)

    def step() -> None:
        model(batches()[0].requires_grad_()).sum().backward()
        model.zero_grad()

    assert equal(step).num_gradients == 5


def test_results_of_autograd_grad() -> None:
    model = tiny_net(dropout=0.0)

    def step(factor: float) -> Any:
        return {"gradients": torch.autograd.grad(model(batches()[0]).sum() * factor, list(model.parameters()))}

    assert equal(lambda: step(1)).compared["result"] == 8
    report = verify(lambda: step(1), lambda: step(2))
    assert report.verdict == "different"
    assert report.first is not None
    assert str(report.first.place) == "result gradients[0] of step 1"


def test_passes_backward_through_one_graph_twice() -> None:
    model = tiny_net(dropout=0.0)

    def step(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        output = call(model, batches()[0])
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
        model.zero_grad()

    assert equal(lambda: step(SWITCHES["nothing"]), lambda: step(SWITCHES["checkpoint"])).compared["loss"] == 4


def test_several_roots() -> None:
    model = tiny_net(dropout=0.0)

    def step() -> None:
        output = model(batches()[0])
        torch.autograd.backward([output.sum(), output[0]], [torch.tensor(2.0), torch.ones(WIDTH)])
        model.zero_grad()

    assert equal(step).compared["loss"] == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_a_model_of_another_dtype(dtype: torch.dtype) -> None:
    model, x = nn.Linear(WIDTH, WIDTH, dtype=dtype), batches()[0].to(dtype)

    def step(factor: float) -> None:
        model.zero_grad()
        (model(x).abs() * factor).sum().backward()

    equal(lambda: step(1))
    assert verify(lambda: step(1), lambda: step(1.5)).verdict == "different"


def test_inputs_of_every_kind() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)
            self.register_buffer("scale", torch.ones((), dtype=torch.float8_e4m3fn))

        def forward(self, tokens: Tensor, *others: Any, mask: Tensor, nested: dict[str, Any]) -> Any:
            return (self.table(tokens) * mask[:, None]).sum() * self.scale.float()

    model = Model()

    def step(flipped: bool = False) -> None:
        tokens, mask = torch.arange(4), torch.tensor([True, False, True, flipped])
        others = torch.empty(0, 3), torch.tensor(1 + 2j), torch.ones(2).to(torch.float8_e5m2), "text", 3
        model(tokens, *others, mask=mask, nested={"deep": [torch.ones(2, 2).t()[:, ::2]]}).backward()
        model.zero_grad()

    assert equal(step).compared["input"] == 10  # none of the empty tensor
    report = verify(step, lambda: step(flipped=True))
    assert report.first is not None
    assert str(report.first.place) == "input mask of micro-batch 1 of step 1"


def test_sparse_gradients() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(token: int) -> None:
        optimizer.zero_grad()
        table(torch.tensor([1, 1, token])).sum().backward()
        optimizer.step()

    equal(lambda: step(2))
    assert verify(lambda: step(2), lambda: step(3)).verdict == "different"


def test_a_quantised_base_with_adapters() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
            torchao_quantization.quantize_(self.base, torchao_quantization.Int8WeightOnlyConfig(version=2))
            self.adapter = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Any:
            return self.base(x) + self.adapter(x)

    model, x = Adapted(), torch.ones(2, 32)

    def step(factor: float) -> None:
        model(x).square().sum().mul(factor).backward()
        model.zero_grad()

    equal(lambda: step(1))
    assert verify(lambda: step(1), lambda: step(2)).verdict == "different"


def test_distributed_tensors(one_rank: None) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = tensor_parallel.distribute_module(tiny_net(dropout=0.0), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = tensor_parallel.distribute_tensor(batches()[0], mesh, [tensor_parallel.Replicate()])

    def step(factor: float) -> None:
        optimizer.zero_grad()
        (model(x).square().sum() * factor).backward()
        optimizer.step()

    assert equal(lambda: step(1)).compared["optimizer"] == 24
    assert verify(lambda: step(1), lambda: step(2)).verdict == "different"


def test_functions_of_torch_func() -> None:
    model = tiny_net(dropout=0.0)

    def step() -> Any:
        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (x,)).square().mean()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), batches())

    assert equal(step).compared["result"] == 8


def test_buffers_that_a_model_replaces() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("first", torch.zeros(1))
            self.register_buffer("second", torch.ones(1))

        def forward(self, x: Tensor) -> Any:
            self.first, self.second = self.first + 1, self.second * 2
            return self.linear(x) * self.second + self.first

    model = Counting()
    first = model.first

    def step() -> None:
        model(batches()[0]).sum().backward()
        model.zero_grad()

    assert equal(step).compared["weight"] == 8
    assert model.first is first
    assert (model.first.item(), model.second.item()) == (0, 1)


def test_a_part_named_module_beside_a_weight_of_the_same_name() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.module = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Any:
            return self.module(x) * self.weight

    model = Outer()

    def step() -> None:
        model(batches()[0]).sum().backward()
        model.zero_grad()

    assert equal(step).num_gradients == 2


@pytest.mark.parametrize("compiled", ["before", "within"])
def test_compiled_models(compiled: str) -> None:
    model = tiny_net(dropout=0.0)
    early = torch.compile(model, backend="eager", fullgraph=True)

    def step(call: Callable[[], Any]) -> Any:
        loss = call()(batches()[0]).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    def compile_now() -> Any:
        dynamo.reset()
        return torch.compile(model, backend="eager", fullgraph=True)

    try:
        equal(lambda: step(lambda: model), lambda: step((lambda: early) if compiled == "before" else compile_now))
    finally:
        dynamo.reset()


def test_the_recorder_breaks_no_graph() -> None:
    model = tiny_net(dropout=0.0)

    def explained() -> tuple[int, int]:
        dynamo.reset()
        found = dynamo.explain(model)(batches()[0])
        return found.graph_break_count, found.graph_count

    try:
        with Recorder():
            assert explained() == (0, 1)
    finally:
        dynamo.reset()


def test_what_was_compiled_inside_records_nothing_afterwards() -> None:
    model = tiny_net(dropout=0.0)
    with Recorder() as recorder:
        call = nn.Module.__call__
        call(model, batches()[0]).sum().backward()
    num = len(recorder.recording.tensors)
    call(model, batches()[0]).sum().backward()
    assert len(recorder.recording.tensors) == num


def test_accumulation_in_other_numbers_of_micro_batches_is_rounding() -> None:
    model = tiny_net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(num: int, weight: float = 1.0) -> None:
        optimizer.zero_grad()
        for part in batches()[0].chunk(num):
            (model(part).square().mean() / num * weight).backward()
        optimizer.step()

    report = verify(lambda: step(1), lambda: step(2))
    assert report.verdict == "rounding", report
    assert "inputs and losses: the runs cut their steps into different numbers" in report.not_compared[0]
    assert verify(lambda: step(1), lambda: step(2, weight=2.0)).verdict == "different"


def test_an_update_within_backward_keeps_no_gradients() -> None:
    plain, switched = tiny_net(dropout=0.0), tiny_net(dropout=0.0)
    one = torch.optim.SGD(plain.parameters(), lr=0.1)
    each = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in switched.parameters()}

    def update(parameter: Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in switched.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step() -> None:
        one.zero_grad()
        plain(batches()[0]).square().mean().backward()
        one.step()

    report = equal(step, lambda: switched(batches()[0]).square().mean().backward())
    assert report.not_compared == ["gradient: the switched run keeps no gradients in .grad"]
    assert report.compared["weight"] == 8
    assert "gradient" not in report.compared


def test_contexts_are_no_part_of_a_step() -> None:
    model = tiny_net(dropout=0.0)

    def step(context: AbstractContextManager[Any]) -> None:
        with context:
            model(batches()[0])
        model(batches()[1]).sum().backward()
        model.zero_grad()

    assert equal(lambda: step(torch.no_grad()), lambda: step(torch.inference_mode())).compared["input"] == 2


def test_a_reference_that_is_called_first_takes_no_names_from_the_model_that_trains() -> None:
    def step_of(reference_first: bool) -> Callable[[], None]:
        torch.manual_seed(0)
        model, reference = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())

        def referred() -> Tensor:
            with torch.no_grad():
                return reference(torch.ones(2, 4))

        def step() -> None:
            before = referred() if reference_first else None
            outputs = model(torch.ones(2, 4))
            (outputs - (referred() if before is None else before)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    assert verify(step_of(reference_first=False), step_of(reference_first=True)).equal


def test_an_optimizer_in_the_backward_pass_of_some_weights() -> None:
    def step(model: nn.Module, hooked: bool) -> Callable[[], None]:
        optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

        def update(weight: Tensor) -> None:
            optimizers[weight].step()
            weight.grad = None

        if hooked:
            model[0].weight.register_post_accumulate_grad_hook(update)

        def whole() -> None:
            model(batches()[0]).square().mean().backward()
            for weight in model.parameters():
                if weight.grad is not None:
                    update(weight)

        return whole

    plain = tiny_net(dropout=0.0)
    report = verify(step(plain, False), step(copy.deepcopy(plain), True))
    assert report.equal, report
