"""Mode "inputs": the inputs of checkpointed blocks, all of them and nothing else. Labels in a profiler's trace."""

from collections.abc import Callable

import pytest
import torch
import transformers
from adversarial_copier import AdversarialCopier
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from hf_memopt import ActivationOffloader
from hf_memopt.transfer import Copier, SyncCopier

COPIERS: dict[str, Callable[[], Copier]] = {"sync": SyncCopier, "late": lambda: AdversarialCopier("late")}
NUM_LAYERS, HIDDEN = 3, 32


@pytest.fixture
def decoder() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": NUM_LAYERS, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads, use_cache=False)).train()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, tokens: Tensor, offloader: ActivationOffloader | None = None) -> list[Tensor]:
    if offloader is None:
        loss = model(input_ids=tokens, labels=tokens).loss
    else:
        with offloader.offload_context(model):
            loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_each_block_input_moves_once_and_nothing_else(
    decoder: nn.Module, tokens: Tensor, copier: str, use_reentrant: bool
) -> None:
    decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    decoder.enable_input_require_grads()
    want = gradients(decoder, tokens)
    offloader = ActivationOffloader(offload_threshold_mb=0.002, mode="inputs", copier=COPIERS[copier]())
    for step in range(1, 4):
        got = gradients(decoder, tokens, offloader)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        # Smaller than the threshold are the rotary tables and masks, which are inputs of every block too.
        assert offloader.stats.bytes_moved == step * NUM_LAYERS * tokens.numel() * HIDDEN * 4
    assert offloader.stats.host_bytes_live == 0
    assert offloader.stats.measured_peak_gib <= 3 * tokens.numel() * HIDDEN * 4 / 2**30


def test_without_checkpointing_nothing_moves(decoder: nn.Module, tokens: Tensor) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, mode="inputs", copier=SyncCopier())
    gradients(decoder, tokens, offloader)
    assert offloader.stats.bytes_moved == 0
    assert offloader.stats.bytes_kept > 0


def test_transfers_are_labelled_in_a_trace(decoder: nn.Module, tokens: Tensor) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, mode="all", copier=SyncCopier())
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        gradients(decoder, tokens, offloader)
    names = [event.name for event in trace.events() if event.name.startswith("hf_memopt::")]
    whats = {name.removeprefix("hf_memopt::").partition(" #")[0] for name in names}
    assert whats == {"offload", "wait for offload", "prefetch", "wait for prefetch"}
    assert all(name.endswith("MiB") for name in names)
