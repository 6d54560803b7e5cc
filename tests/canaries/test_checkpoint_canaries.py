"""Canaries of selective checkpointing in torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_imports import LateModule
from reliance import relied_on_by
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import dropout
from torch.utils.checkpoint import SAC_IGNORED_OPS, checkpoint, create_selective_checkpoint_contexts

from hf_memopt.activations.checkpointing.save_policies import HEAVY_OPS

modeling_layers = LateModule("transformers.modeling_layers")


CHECKPOINTING = "hf_memopt/activations/checkpointing/selective.py"
KEPT_OUTPUTS = "hf_memopt/activations/checkpointing/save_policies.py"

ATEN = torch.ops.aten


def keep(*operations: Any) -> Any:
    return partial(create_selective_checkpoint_contexts, list(operations))


def numels_packed(region: Any, x: Tensor, **options: Any) -> list[int]:
    packed: list[int] = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor.numel()) or tensor, lambda tensor: tensor):
        checkpoint(region, x, use_reentrant=False, **options)
    return [numel for numel in packed if numel]


def test_torch_still_hides_what_it_keeps_from_hooks() -> None:
    """Watch the reason for our own contexts, which can go once torch shows kept outputs to hooks."""
    with relied_on_by(KEPT_OUTPUTS):
        x = torch.randn(2, 4, requires_grad=True)
        assert numels_packed(lambda x: (x @ x.T).exp(), x, context_fn=keep(ATEN.mm.default)) == [8]


def test_torch_still_allows_one_backward_only() -> None:
    with relied_on_by(KEPT_OUTPUTS):
        x = torch.randn(2, 2, requires_grad=True)
        y = checkpoint(lambda x: (x @ x).exp(), x, use_reentrant=False, context_fn=keep(ATEN.mm.default)).sum()
        y.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward an extra time"):
            y.backward()


def test_torch_still_skips_the_random_numbers_of_what_it_keeps() -> None:
    with relied_on_by(KEPT_OUTPUTS):
        x = torch.ones(100, requires_grad=True)
        found = []
        for run in (
            lambda f, x: f(x),
            partial(checkpoint, use_reentrant=False, context_fn=keep(ATEN.rand_like.default)),
        ):
            torch.manual_seed(0)
            y = run(lambda x: dropout(torch.rand_like(x) * x, 0.5).exp(), x)
            found.append(torch.autograd.grad(y.sum(), [x])[0])
        assert not torch.equal(*found)


def test_a_region_is_recomputed_under_the_second_context_at_every_backward() -> None:
    with relied_on_by(KEPT_OUTPUTS):
        entered: list[str] = []

        @contextmanager
        def note(name: str) -> Iterator[None]:
            entered.append(name)
            yield

        class Note:
            def __enter__(self) -> None:
                entered.append("again")

            def __exit__(self, *exception: object) -> None:
                pass

        x = torch.randn(3, requires_grad=True)
        y = checkpoint(lambda x: x.exp(), x, use_reentrant=False, context_fn=lambda: (note("first"), Note())).sum()
        y.backward(retain_graph=True)
        y.backward()
        assert entered == ["first", "again", "again"]


def test_only_tensors_at_the_top_are_saved_as_tensors() -> None:
    """Watch the reason for passing arguments flat."""
    with relied_on_by(CHECKPOINTING):
        x, y = torch.randn(4, requires_grad=True), torch.randn(8)
        assert numels_packed(lambda x, pair: x * pair[0].sum(), x, pair=[y]) == [4]
        packed: list[int] = []
        with saved_tensors_hooks(lambda tensor: packed.append(tensor.numel()) or tensor, lambda tensor: tensor):
            checkpoint(lambda x, y: x * y.sum(), x, y, use_reentrant=False)
        assert sorted(numel for numel in packed if numel) == [4, 8]


def test_heavy_operations_are_named_as_before() -> None:
    with relied_on_by(KEPT_OUTPUTS):
        known = {schema.name for schema in torch._C._jit_get_all_schemas()} | {"flex_attention"}
        assert known >= HEAVY_OPS
        assert torch.ops.higher_order.flex_attention.name() == "flex_attention"
        assert ATEN.mm.default.name().partition(".")[0] == "aten::mm"
        attention = {name for name in known if name.startswith("aten::_scaled_dot_product_") and "backward" not in name}
        decomposed = {name for name in attention if "attention_math" in name}
        assert attention - decomposed <= HEAVY_OPS, "a new attention kernel: add it to HEAVY_OPS"


def test_random_operations_say_so() -> None:
    with relied_on_by(KEPT_OUTPUTS):
        for operation in (ATEN.rand_like.default, ATEN.native_dropout.default, ATEN.bernoulli_.float):
            assert torch.Tag.nondeterministic_seeded in operation.tags
        for name in HEAVY_OPS:
            if "attention" in name and name.startswith("aten::"):
                operation = getattr(ATEN, name.removeprefix("aten::")).default
                assert torch.Tag.nondeterministic_seeded in operation.tags
                assert "dropout_p" in {argument.name for argument in operation._schema.arguments}


def test_views_and_in_place_operations_say_so() -> None:
    with relied_on_by(KEPT_OUTPUTS):
        for operation in (ATEN.view.default, ATEN.t.default, ATEN.relu_.default, ATEN.mm.out):
            assert any(result.alias_info is not None for result in operation._schema.returns)
        assert not any(result.alias_info is not None for result in ATEN.mm.default._schema.returns)
        assert ATEN.detach.default in SAC_IGNORED_OPS


def test_a_node_keeps_what_it_saved_as_long_as_its_output_lives() -> None:
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
            ctx.save_for_backward(tensor)
            return anchor.new_empty(0)

    with relied_on_by(KEPT_OUTPUTS):
        tensor = torch.randn(4)
        output = Save.apply(torch.empty(0, requires_grad=True), tensor.detach())
        for _ in range(2):
            assert torch.equal(output.grad_fn.saved_tensors[0], tensor)
        tensor.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            _ = output.grad_fn.saved_tensors


def test_normalisation_writes_its_statistics_unseen() -> None:
    """Watch the reason for knowing norms by class, and other writers by their buffers' versions."""
    with relied_on_by(CHECKPOINTING):
        norm = nn.BatchNorm1d(2)
        before = norm.running_mean._version, norm.running_mean.clone()
        norm(torch.randn(4, 2))
        assert norm.running_mean._version == before[0]
        assert not torch.equal(norm.running_mean, before[1])
        assert isinstance(nn.InstanceNorm1d(2), nn.modules.batchnorm._NormBase)


def test_a_forward_attribute_is_what_a_module_runs() -> None:
    with relied_on_by(CHECKPOINTING):
        module = nn.Linear(2, 2)
        keys = module.state_dict().keys()
        module.forward = lambda x: "replaced"
        assert module(torch.ones(2)) == "replaced"
        assert module.state_dict().keys() == keys
        del module.forward
        assert module(torch.ones(2)).shape == (2,)


def test_transformers_checkpoints_layers_by_attribute_and_without_cache() -> None:
    class Layer(modeling_layers.GradientCheckpointingLayer):
        def forward(self, x: Tensor, **kwargs: Any) -> dict[str, Any]:
            return kwargs

    with relied_on_by(CHECKPOINTING):
        layer = Layer()
        assert layer.gradient_checkpointing is False
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda function, *args: function(*args)
        cache = SimpleNamespace()
        given = {"use_cache": True, "past_key_values": cache, "past_key_value": cache, "layer_past": cache}
        without = {"use_cache": False, "past_key_values": None, "past_key_value": None, "layer_past": None}
        # Newer versions leave `past_key_value` alone, which is no name of their layers.
        assert layer(torch.ones(1), **given) | {"past_key_value": None} == without
