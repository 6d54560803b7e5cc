"""Autocast on the virtual accelerator, by CUDA's policy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated import operations, simulated
from torch import Tensor, nn

from hf_memopt.planning.simulation.kernels import autocast

HALF, WHOLE = torch.bfloat16, torch.float32

AUTOCAST: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "matrix products run in half precision": (lambda whole, half: whole @ whole, HALF),
    "convolutions": (lambda whole, half: F.conv1d(whole[None], whole[:, :, None]), HALF),
    "layer norm in float32": (lambda whole, half: F.layer_norm(half, half.shape[-1:]), WHOLE),
    "losses": (lambda whole, half: F.mse_loss(half, half), WHOLE),
    "powers": (lambda whole, half: half.pow(2), WHOLE),
    "sums give float32": (lambda whole, half: half.sum(), WHOLE),
    "sums in a dtype that is named": (lambda whole, half: half.sum(0, dtype=HALF), HALF),
    "two dtypes meet in the wider one": (lambda whole, half: torch.addcmul(whole, half, half), WHOLE),
    "halves stay halves": (lambda whole, half: torch.addcmul(half, half, half), HALF),
    "other operations are left alone": (lambda whole, half: F.gelu(half), HALF),
}


@pytest.fixture(scope="module")
def autocast_dtypes() -> dict[str, torch.dtype]:
    def run(device: torch.device) -> dict[str, torch.dtype]:
        whole, half = torch.zeros(8, 8, device=device), torch.zeros(8, 8, dtype=HALF, device=device)
        with torch.autocast("cuda", HALF):
            return {name: operation(whole, half).dtype for name, (operation, _) in AUTOCAST.items()}

    return simulated(run)


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name: str, autocast_dtypes: dict[str, torch.dtype]) -> None:
    assert autocast_dtypes[name] == AUTOCAST[name][1]


def test_a_weight_is_cast_once_and_its_copy_dies_with_autocast() -> None:
    def run(device: torch.device) -> Any:
        layer, frozen = (nn.Linear(8, 8, bias=False, device=device) for _ in range(2))
        frozen.requires_grad_(False)
        x = torch.zeros(4, 8, dtype=HALF, device=device)
        counts = []
        for module in (layer, frozen):
            with operations() as names, torch.autocast("cuda", HALF):
                module(module(x))
                counts.append((names.count("_to_copy"), len(autocast._cast_weights)))
        with operations() as names, torch.autocast("cuda", HALF, cache_enabled=False):
            layer(layer(x))
        return counts, names.count("_to_copy"), len(autocast._cast_weights)

    assert simulated(run) == ([(1, 1), (2, 0)], 2, 0)
