"""Tests of resuming on a GPU, with its random numbers and the loss scaler."""

from pathlib import Path

import pytest
import torch
from toy_run import NUM_STEPS, ToyRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("step", range(1, NUM_STEPS))
def test_a_run_on_a_gpu_resumes_bit_for_bit(step: int, mixed_precision: str, tmp_path: Path) -> None:
    whole = ToyRun(tmp_path / "whole", cpu=False, mixed_precision=mixed_precision)
    whole.train()
    expected = whole.state()
    assert "device" in expected
    ToyRun(tmp_path / "run", cpu=False, mixed_precision=mixed_precision).train(step, save=True)
    torch.cuda.manual_seed_all(9)
    resumed = ToyRun(tmp_path / "run", seed=1, cpu=False, mixed_precision=mixed_precision)
    resumed.resume()
    resumed.train()
    assert resumed.state() == expected
