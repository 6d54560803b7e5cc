import pytest
from transformers_toys import FolderOf, estimate

from hf_memopt.planning import MemoryEstimate


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
