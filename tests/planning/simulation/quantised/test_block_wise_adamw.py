import pytest
import torch
from torch import nn

from hf_memopt.planning.simulation.quantised.block_wise_adamw import BlockWiseAdamW


def states(num_numbers: int, bits: int, is_paged: bool = False) -> dict[str, int]:
    weight = nn.Parameter(torch.ones(num_numbers, dtype=torch.bfloat16))
    optimizer = BlockWiseAdamW([weight], bits=bits, is_paged=is_paged)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return {name: state.nbytes for name, state in optimizer.state[weight].items()}


def test_two_bytes_for_each_number_and_two_scales_for_256() -> None:
    maps = {"qmap1": 1024, "qmap2": 1024}
    assert states(4096, bits=8) == {"state1": 4096, "state2": 4096, **maps, "absmax1": 64, "absmax2": 64}
    assert states(4097, bits=8)["absmax1"] == 68


@pytest.mark.parametrize(("num_numbers", "bits"), [(4095, 8), (4096, 32)])
def test_small_weights_and_all_weights_in_32_bits_have_float32(num_numbers: int, bits: int) -> None:
    assert states(num_numbers, bits) == {"state1": 4 * num_numbers, "state2": 4 * num_numbers}


def test_weights_of_an_optimizer_share_their_maps_and_those_without_a_gradient_have_no_state() -> None:
    weights = [nn.Parameter(torch.ones(4096)) for _ in range(3)]
    optimizer = BlockWiseAdamW(weights, bits=8, is_paged=False)
    for weight in weights[:2]:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    first, second = (optimizer.state[weight] for weight in weights[:2])
    assert first["qmap1"] is second["qmap1"]
    assert weights[2] not in optimizer.state
