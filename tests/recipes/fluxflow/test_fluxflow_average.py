import os

import pytest
import torch
from late_imports import LateModule
from torch import nn

fluxflow_model = LateModule("hf_memopt.recipes.fluxflow.model")


def test_the_average_is_exponential_and_leaves_the_model_alone() -> None:
    model = nn.Linear(2, 1, bias=False)
    average = fluxflow_model.WeightAverage(model, 0.5, torch.device("cpu"))
    nn.init.constant_(model.weight, 1.0)
    average.step()  # the first step copies the weights
    nn.init.constant_(model.weight, 3.0)
    average.step()
    with average.applied():
        assert model.weight.tolist() == [[pytest.approx(3 - 2 * 2 / 11)] * 2]
    assert model.weight.tolist() == [[3.0, 3.0]]


def test_expandable_segments_are_asked_for_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in fluxflow_model.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(fluxflow_model.torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"CUDA has started already.*set PYTORCH_ALLOC_CONF=expandable_segments:True"):
        fluxflow_model.use_expandable_segments()
    monkeypatch.setattr(fluxflow_model.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv(fluxflow_model.ALLOCATOR_SETTINGS[1], "max_split_size_mb:64")
    with pytest.raises(ValueError, match="PYTORCH_CUDA_ALLOC_CONF='max_split_size_mb:64' is set already; add"):
        fluxflow_model.use_expandable_segments()
    monkeypatch.delenv(fluxflow_model.ALLOCATOR_SETTINGS[1])
    monkeypatch.setenv(fluxflow_model.ALLOCATOR_SETTINGS[0], "")  # restored afterwards
    monkeypatch.delenv(fluxflow_model.ALLOCATOR_SETTINGS[0])
    fluxflow_model.use_expandable_segments()
    assert os.environ.pop(fluxflow_model.ALLOCATOR_SETTINGS[0]) == "expandable_segments:True"
