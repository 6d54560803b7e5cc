import pytest
import torch
from adversarial_copier import AdversarialCopier
from torch import Tensor, nn

from hf_memopt.weights.homes import HostHome
from hf_memopt.weights.packed_weights import PackedWeights
from hf_memopt.weights.streaming.copy_schedule import Block
from hf_memopt.weights.streaming.ring import Ring


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.ParameterList(torch.randn(64) for _ in range(4))


@pytest.mark.parametrize("schedule", ["early", "late"])
def test_a_block_is_bound_and_given_back(module: nn.ParameterList, schedule: str) -> None:
    want = [weight.detach().clone() for weight in module]
    weights, copier = PackedWeights(module), AdversarialCopier(schedule)
    master = copier.empty_host(weights.num_bytes)
    weights.pack(master)
    home = HostHome(weights, master, copier)
    in_place = home.views
    blocks = [Block((0, 1), 512), Block((3, 2), 512)]
    ring = Ring(copier, home, weights.slices, in_place, blocks, slot_bytes=512)
    for number, (first, second) in enumerate(((0, 1), (2, 3))):
        ring.fetch(number)
        ring.fetch(number)
        ring.bind(number)
        assert ring.is_bound(number)
        assert torch.equal(module[first], want[first])
        assert torch.equal(module[second], want[second])
        assert module[first].data_ptr() != in_place[first][0].data_ptr()
    assert copier.bytes_to_device == master.nbytes
    assert ring.device_bytes == ring.peak_device_bytes == 1024
    for number in ring.present:
        ring.evict(number)
    assert ring.device_bytes == copier.live_bytes == 0
    assert all(_same_memory(weight, view) for weight, (view,) in zip(module, in_place, strict=True))


def _same_memory(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() == second.data_ptr()
