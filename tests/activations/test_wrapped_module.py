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
from hf_memopt.activations.wrapped_module import hook_direct_calls


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


def test_direct_calls_of_forward_are_offloaded_once_too(decoder: nn.Module, tokens: Tensor, make: Any) -> None:
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    handle = make().wrap(decoder)
    language_loss(decoder, tokens).backward()
    moved = handle.offloader.stats.bytes_moved
    take_gradients(decoder)
    hook_direct_calls(decoder)
    for num_calls, call in enumerate((decoder, decoder.forward), start=2):
        call(input_ids=tokens, labels=tokens).loss.backward()
        assert equal(take_gradients(decoder), want)
        assert handle.offloader.stats.bytes_moved == num_calls * moved


def test_a_copys_direct_calls_use_its_own_weights() -> None:
    model = nn.Linear(4, 4)
    handle = ActivationOffloader(offload_threshold_mb=0, mode="all", copier=SyncCopier()).wrap(model)
    hook_direct_calls(model)
    clones = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    x = torch.randn(2, 4)
    for clone in clones:
        nn.init.ones_(clone.weight)
        nn.init.zeros_(clone.bias)
        assert torch.equal(clone.forward(x), x.sum(1, keepdim=True).expand(2, 4))
    handle.remove()
    assert torch.equal(model.forward(x), model(x))
