import pytest
import torch
from counted_allocator import CountedAllocator
from late_imports import LateModule
from torch import Tensor, nn
from transformers_toys import TOKENS, FolderOf, estimate

from hf_memopt.estimate import MemoryEstimate, estimate_peak_memory
from hf_memopt.jobs.transformers_models.optimizers import update_in_backward

huggingface = LateModule("hf_memopt.jobs.huggingface")


@pytest.mark.slow
def test_optimizers_differ_in_their_state(qwen3: str, plain: MemoryEstimate) -> None:
    weights = plain.breakdown["parameters"]
    assert 2 * weights < plain.breakdown["optimizer state"] < 2.2 * weights
    assert "optimizer state" not in estimate(qwen3, optimizer="sgd").breakdown
    assert estimate(qwen3, optimizer="adafactor").breakdown["optimizer state"] < weights / 4
    foreach = estimate(qwen3, optimizer="adamw-foreach")
    workspaces = plain.breakdown["library workspaces"]
    assert foreach.phases["optimizer"] - workspaces > 5 * weights > plain.phases["optimizer"] - workspaces


def test_pages_are_on_the_host(folder_of: FolderOf) -> None:
    vocabulary, hidden = 2048, 64
    folder = folder_of("qwen3", vocab_size=vocabulary, num_hidden_layers=1, tie_word_embeddings=True)
    resident, paged = (estimate(folder, optimizer=name) for name in ("adamw-8bit-bnb", "paged-adamw-8bit"))
    # Input and output share the only weight with at least 100,000 numbers; a byte for each of its two states.
    pages = 2 * vocabulary * hidden
    assert paged.host_bytes - resident.host_bytes == pages
    assert resident.breakdown["optimizer state"] - paged.breakdown["optimizer state"] == pages


WIDTH, DEPTH = 64, 6


def in_backward(device: torch.device) -> tuple[nn.Module, Tensor]:
    with device:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        inputs = torch.zeros(1, WIDTH)
    update_in_backward(list(model.parameters()), "sgd")
    return model, inputs


def train(state: tuple[nn.Module, Tensor]) -> None:
    model, inputs = state
    model(inputs).sum().backward()


def test_updates_in_backward_leave_one_gradient_alive_as_in_a_real_run() -> None:
    allocator = CountedAllocator()
    with allocator:
        state = in_backward(torch.device("cpu"))
    allocator.charge(state[0].parameters())
    allocator.peak_bytes = allocator.allocated_bytes
    with allocator:
        train(state)
    assert estimate_peak_memory(in_backward, train, like="cpu").peak_bytes == allocator.peak_bytes
    weight = WIDTH * WIDTH * 4
    assert (DEPTH + 1) * weight < allocator.peak_bytes < (DEPTH + 2) * weight


def test_a_model_is_updated_in_backward(qwen3: str) -> None:
    plain, early = (
        estimate(qwen3, seq_len=2, max_grad_norm=None, optimizer_in_backward=early) for early in (False, True)
    )
    assert early.unreached == ()
    assert plain.peak_bytes - early.peak_bytes > 0.5 * plain.breakdown["parameters"]
    workload = huggingface.HuggingFaceModel(qwen3, seq_len=TOKENS, max_grad_norm=None, optimizer_in_backward=True)
    assert workload.micro_batches == [8]
    with pytest.raises(ValueError, match=r"micro_batch=4: .* use that of effective_batch=8"):
        workload.step_with("none", "off", 4)
