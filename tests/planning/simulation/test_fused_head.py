"""Memory of TRL's output layer, whose kernels work in place."""

from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import nn

from hf_memopt.planning import estimate_peak_memory

kernels = LateModule("trl.kernels.chunked_logprob")
NUM_TOKENS, WIDTH, VOCABULARY, CHUNK = 256, 64, 4096, 1024


def setup(device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    with device:
        head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)
        hidden = torch.zeros(NUM_TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        return head, hidden, torch.zeros(NUM_TOKENS, dtype=torch.long)


def step(state: tuple[Any, torch.Tensor, torch.Tensor]) -> None:
    head, hidden, labels = state
    function = kernels.ChunkedLogProbFunction
    log_probs, *_ = function.apply(hidden, head.weight, None, labels, 1.0, CHUNK, None, 1.0, ("log_probs",))
    log_probs.sum().backward()


@pytest.mark.parametrize("trained", [False, True])
def test_one_tile_and_gradients_in_float32_are_all_that_is_made(trained: bool) -> None:
    assert kernels.ChunkedLogProbFunction is not None  # imports the kernels before the process is forked

    def prepared(device: torch.device) -> Any:
        state = setup(device)
        state[0].requires_grad_(trained)
        return state

    found = estimate_peak_memory(prepared, step, num_steps=1)
    tile, hidden, weight = NUM_TOKENS * CHUNK * 2, NUM_TOKENS * WIDTH, VOCABULARY * WIDTH
    # Gradients in float32, the input's gradient also in its own type, and a number for each token.
    assert found.breakdown["temporaries"] == tile + (4 + 2) * hidden + 4 * weight * trained + 4 * NUM_TOKENS
    assert found.breakdown.get("gradients", 0) == 2 * weight * trained
