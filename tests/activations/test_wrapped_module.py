"""Tests of wrapped modules, whose hooks survive copies, pickles and exceptions, and can be removed."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from gradients import equal, language_loss, take_gradients
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier


def test_wrap_survives_copies_pickles_and_exceptions(decoder: nn.Module, tokens: Tensor, make: Any) -> None:
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    keys = set(decoder.state_dict())
    handle = make().wrap(decoder)
    for model in (decoder, copy.deepcopy(decoder)):
        language_loss(model, tokens).backward()
        assert equal(take_gradients(model), want)
        with pytest.raises(IndexError):
            language_loss(model, tokens + 1000)
    assert set(decoder.state_dict()) == keys
    moved = handle.offloader.stats.bytes_moved
    language_loss(copy.deepcopy(decoder), tokens).backward()
    assert handle.offloader.stats.bytes_moved == moved > 0  # copies have offloaders of their own
    handle.remove()
    assert not decoder._forward_pre_hooks
    assert not decoder._forward_hooks
    gc.collect()
    assert handle.offloader.stats.host_bytes_live == 0


def test_a_wrapped_module_pickles() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    ActivationOffloader(offload_threshold_mb=0, mode="all", copier=SyncCopier()).wrap(model)
    clone = pickle.loads(pickle.dumps(model))
    x = torch.randn(2, 4)
    assert torch.equal(clone(x), model(x))
