"""TRL's fused loss on the virtual device takes what its Triton kernels take on CUDA: a tile of logits, no more."""

from pathlib import Path

import pytest
import torch
import trl_trainers
from late_imports import LateModule
from simulated import operations, simulated

estimates = LateModule("hf_memopt.integrations.transformers.trainer_estimate")
trl_kernels = LateModule("hf_memopt.integrations.transformers.trl_kernels")

TILE = 32768

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_loss_holds_one_tile_of_logits(tmp_path: Path) -> None:
    found = estimates.estimate_trainer(trl_trainers.sft(tmp_path, bf16=True))
    tiles = [tensor for tensor in found.top if tensor.shape[-1:] == (TILE,)]
    assert [(tensor.kind, tensor.dtype) for tensor in tiles] == [("temporaries", "bfloat16")]
    assert found.breakdown["temporaries"] < 1.1 * tiles[0].num_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_added_in_place(dtype: torch.dtype) -> None:
    def add(device: torch.device) -> list[str]:
        total = torch.zeros(4, 8, device=device)
        left, right = torch.zeros(4, 6, dtype=dtype, device=device), torch.zeros(6, 8, dtype=dtype, device=device)
        with operations() as names:
            trl_kernels._add_product(total, left, right)
        return names

    assert simulated(add)[-1] == {torch.bfloat16: "mm", torch.float32: "addmm_"}[dtype]
