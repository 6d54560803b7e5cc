import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from teacher_toys import Network
from torch import Tensor, nn

from hf_memopt.transfer import SyncCopier
from hf_memopt.weights import OffloadedTeacher
from hf_memopt.weights.homes.packed_weights import PackedWeights, bind
from hf_memopt.weights.homes.packed_weights import views as packed_views


def test_ties_strides_and_small_tensors_survive(network: Network) -> None:
    stride, num_bytes = network.transposed.stride(), sum(p.nbytes for p in network.parameters())
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", copier=SyncCopier())
    with teacher.onload() as module:
        assert module.tied.weight is module.embed.weight
        assert module.transposed.stride() == stride
        assert module.frequencies.data_ptr() != module.embed.weight.data_ptr()
    assert num_bytes < teacher.report().host_bytes < num_bytes + 256 * 16


def test_views_of_one_storage_travel_once() -> None:
    module = nn.Module()
    whole = torch.randn(100)
    module.register_buffer("left", whole[:60])
    module.register_buffer("right", whole[40:])
    weights = PackedWeights(module)
    assert weights.num_bytes == 512  # 400 bytes, aligned
    block = torch.empty(weights.num_bytes, dtype=torch.uint8)
    weights.pack(block)
    bind(weights.offsets, packed_views(weights.offsets, block))
    assert torch.equal(module.left, whole[:60])
    assert module.right.data_ptr() - module.left.data_ptr() == 40 * 4


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    dtype = draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
    )
    size = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    base = torch.arange(200).to(dtype)
    stride = [draw(st.integers(0, 9)) for _ in size]
    return base.as_strided(size, stride, draw(st.integers(0, 50)))


@settings(max_examples=300, deadline=None)
@given(st.lists(views(), min_size=1, max_size=5))
def test_any_views_are_restored(tensors: list[Tensor]) -> None:
    module = nn.Module()
    for index, tensor in enumerate(tensors):
        module.register_buffer(f"buffer_{index}", tensor)
    want = [(tensor.clone(), tensor.stride()) for tensor in tensors]
    weights = PackedWeights(module)
    block = torch.full((weights.num_bytes,), 255, dtype=torch.uint8)
    weights.pack(block)
    bind(weights.offsets, packed_views(weights.offsets, block.clone()))
    for (value, stride), tensor in zip(want, module.buffers(), strict=True):
        assert torch.equal(tensor, value)
        assert tensor.stride() == stride


class Quantised(Tensor):
    pass


@pytest.mark.parametrize("weight", [torch.randn(2, 2).as_subclass(Quantised), torch.empty(2, 2, device="meta")])
def test_weights_that_cannot_be_rebound_are_refused(weight: Tensor) -> None:
    module = nn.Module()
    module.register_buffer("odd", weight)
    with pytest.raises(ValueError, match="frozen weight 'odd'"):
        OffloadedTeacher(module, device="cpu")
