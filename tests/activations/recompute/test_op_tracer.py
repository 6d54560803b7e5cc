"""Tests of the records of operations, and of the tensors that the records keep alive."""

import weakref

import torch
from torch import Tensor, nn

from hf_memopt.activations.recompute.op_tracer import OpTracer, TensorRef, TracedOp


def recorded(recorder: OpTracer, tensor: Tensor) -> TracedOp:
    record = recorder.record_of(recorder.operand(tensor))
    assert record is not None
    return record


def operands(record: TracedOp) -> list[TensorRef]:
    return [argument for argument in record.args if isinstance(argument, TensorRef)]


def test_a_weight_is_held_without_its_history() -> None:
    """Check that no finished pass keeps a gradient accumulator, of which torch warns on another stream."""
    linear, x = nn.Linear(4, 8, bias=False), torch.randn(2, 4)
    recorder = OpTracer(frozenset(), None)
    with recorder:
        y = linear(x)
    weight = operands(recorded(recorder, y))[1].weight  # the product reads a transposed view of the weight
    assert weight is linear.weight


def test_nothing_else_is_held() -> None:
    recorder = OpTracer(frozenset(), None)
    with recorder:
        x = torch.randn(4).relu()
        y = x + 1
    entry = weakref.ref(x)
    del x
    assert entry() is None
    assert operands(recorded(recorder, y))[0].alive() is None


def test_a_storage_that_was_written_to_has_no_record() -> None:
    recorder = OpTracer(frozenset(), None)
    with recorder:
        x = torch.ones(4)
        y = x + 1
        assert recorded(recorder, y).func is torch.ops.aten.add.Tensor
        y.data.mul_(2)  # a write that y's version does not show
    assert recorder.record_of(recorder.operand(y)) is None


def test_what_draws_random_numbers_has_no_record() -> None:
    recorder = OpTracer(frozenset(), None)
    with recorder:
        y = torch.rand_like(torch.ones(4))
    assert recorder.record_of(recorder.operand(y)) is None
