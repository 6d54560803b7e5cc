"""Canaries of FSDP2's gradients between two exchanges, which are dropped after an error."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hf_memopt.training.rank_exchange import drop_gradients


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_that_were_not_exchanged_can_be_dropped(dtype: torch.dtype | None) -> None:
    mesh = distributed.init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(2, 1, bias=False), mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)

    def gradient() -> float:
        model(torch.ones(1, 2)).sum().backward()
        found = model.weight.grad
        assert isinstance(found, DTensor)
        return float(found.full_tensor().max())

    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    model.set_requires_gradient_sync(True)
    assert gradient() == 2  # zero_grad alone would leave the first gradient
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    model.set_requires_gradient_sync(True)
    drop_gradients(model)
    assert gradient() == 1
