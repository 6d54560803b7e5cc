"""Tests of AdamW with low-bit states: its memory, by estimate and on real tensors, and its refusals."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from hf_memopt.planning import MemoryEstimate, estimate_peak_memory
from hf_memopt.training.low_bit import low_bit_adamw

WIDTH = 512
WEIGHT_BYTES = 4 * 4 * WIDTH * WIDTH  # of four layers, float32


def model_on(device: torch.device) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(4)))


def estimate(bits: int) -> MemoryEstimate:
    def setup(device: torch.device) -> Any:
        model = model_on(device)
        optimizer = low_bit_adamw(bits)(model.parameters()) if bits < 32 else torch.optim.AdamW(model.parameters())
        return model, optimizer, torch.zeros(8, WIDTH, device=device)

    def step(state: Any) -> None:
        model, optimizer, batch = state
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return estimate_peak_memory(setup, step)


@pytest.mark.parametrize("bits", [8, 4])
def test_states_take_their_bits_and_a_scale_per_block(bits: int) -> None:
    found = estimate(bits)
    # Two moments; a float32 scale for each block of 256 values (8 bit) or 128 (4 bit), and tables of a few KiB.
    codes, scales = 2 * WEIGHT_BYTES / 4 * bits / 8, 2 * WEIGHT_BYTES / 4 * 4 / {8: 256, 4: 128}[bits]
    assert found.breakdown["optimizer state"] == pytest.approx(codes + scales, rel=0.02)
    assert found.breakdown["parameters"] == WEIGHT_BYTES
    assert any("compiled code simulated as it is written" in assumption for assumption in found.assumptions)
    assert found.confidence == "medium"


def test_fewer_bits_need_less() -> None:
    peaks = [estimate(bits).peak_bytes for bits in (32, 8, 4)]
    assert peaks[0] > peaks[1] > peaks[2]


def test_real_states_have_the_estimated_size() -> None:
    model = model_on(torch.device("cpu"))
    optimizer = low_bit_adamw(8)(model.parameters())
    state = optimizer._new_buffer(model[0].weight, True)
    inner = sum(getattr(state, name).nbytes for name in state.__tensor_flatten__()[0])
    assert 2 * 4 * inner == pytest.approx(estimate(8).breakdown["optimizer state"], rel=0.02)


def test_the_recipe_makes_the_optimizer_that_its_flag_names() -> None:
    from hf_memopt.recipes.causal_lm.options import parse
    from hf_memopt.recipes.causal_lm.step import make_optimizer

    model = model_on(torch.device("cpu"))
    options: Any = parse("", ["--optimizer_bits=8", "--output_dir=/nonexistent/new"])
    assert type(make_optimizer(model, options, torch.device("cpu"), None)).__name__ == "AdamW8bit"
    with pytest.raises(ValueError, match=r"invalid choice: '16' .choose from 32, 8, 4"):
        parse("", ["--optimizer_bits=16"])


def test_without_torchao_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ValueError, match="optimizer_bits=8 needs torchao: pip install torchao"):
        low_bit_adamw(8)
    with pytest.raises(ValueError, match="optimizer_bits=5: AdamW's states can take 32, 8, 4 bits"):
        low_bit_adamw(5)
