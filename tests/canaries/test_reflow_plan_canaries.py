"""Canaries of simulated reflow training in torch and lerobot."""

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from late_imports import LateModule
from reliance import relied_on_by
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")
smolvlm_with_expert = LateModule("lerobot.policies.smolvla.smolvlm_with_expert")
lerobot_train = LateModule("lerobot.scripts.lerobot_train")


AUTOCAST = "hf_memopt/planning/simulation/kernels/autocast.py"
UNKNOWNS = "hf_memopt/planning/simulation/data_dependent.py"
WEIGHTS = "hf_memopt/planning/simulation/device.py"
PLAN = "recipes/reflow/workload.py"


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss])
def test_reduced_losses_keep_the_memory_of_each_element(loss: Callable[..., torch.Tensor]) -> None:
    with relied_on_by(UNKNOWNS):
        assert loss(torch.ones(8, 16), torch.ones(8, 16)).untyped_storage().nbytes() == 8 * 16 * 4


def test_a_weight_that_autocast_casts_without_a_graph_serves_one_afterwards() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
    with relied_on_by(AUTOCAST):
        assert layer.weight.grad is not None


def test_fake_tensors_have_no_addresses_and_stay_on_their_device() -> None:
    with FakeTensorMode() as mode:
        host, device = torch.empty(4), torch.empty(4, device="meta")
    with relied_on_by(WEIGHTS):
        assert host.untyped_storage().device.type == "meta"
        assert host.untyped_storage()._cdata != torch.empty(4, device="meta").untyped_storage()._cdata
        assert (FakeTensor(mode, torch.empty(4, device="meta"), torch.device("cpu")).device.type) == "cpu"
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            host.data = device


def test_lerobot_updates_and_loads_through_the_names_that_are_simulated() -> None:
    with relied_on_by(PLAN):
        names = list(inspect.signature(lerobot_train.update_policy).parameters)
        assert names[:6] == ["train_metrics", "policy", "batch", "optimizer", "grad_clip_norm", "accelerator"]
        assert {"config", "strict"} <= inspect.signature(
            modeling_smolvla.SmolVLAPolicy.from_pretrained
        ).parameters.keys()
        source = inspect.getsource(smolvlm_with_expert.SmolVLMWithExpertModel.__init__)
        assert "AutoModelForImageTextToText.from_pretrained" in source
        assert "torch_dtype" in source
