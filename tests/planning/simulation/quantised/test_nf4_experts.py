"""Experts in 4 bits: their memory, the tensors that autograd keeps, and the mixtures that they stand in."""

from functools import partial
from pathlib import Path

import pytest
import torch
from late_imports import LateModule
from transformers_toys import step_of

from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.planning.simulation.quantised.quantised_base import Nf4Experts, are_experts, stored

transformers = LateModule("transformers")

WIDTH, INNER, EXPERTS, DEPTH, TOKENS = 128, 64, 4, 2, 32
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 256, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
WEIGHTS = EXPERTS * 3 * WIDTH * INNER


def mixture() -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3MoeConfig(**SIZES, intermediate_size=INNER, head_dim=32)
    )
    return model


def experts_of(model: torch.nn.Module) -> torch.nn.Module:
    return next(module for module in model.modules() if are_experts(module))


def test_experts_keep_half_a_byte_for_each_number_and_a_scale_for_64() -> None:
    packed = Nf4Experts(experts_of(mixture()), torch.bfloat16)
    assert sum(weight.nbytes for weight in packed.parameters()) == WEIGHTS / 2
    assert sum(buffer.nbytes for buffer in packed.buffers()) == WEIGHTS / 64 * 4
    assert not any(weight.requires_grad for weight in packed.parameters())


def test_autograd_keeps_no_unpacked_weight_and_all_tokens_have_a_result() -> None:
    packed = Nf4Experts(experts_of(mixture()), torch.float32)
    states = torch.ones(TOKENS, WIDTH, requires_grad=True)
    chosen, weights = torch.zeros(TOKENS, 2, dtype=torch.long), torch.ones(TOKENS, 2)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
        result = packed(states, chosen, weights)
    assert result.shape == states.shape
    share = TOKENS * 2 // EXPERTS
    assert max(tensor.numel() for tensor in saved) <= max(share * 2 * INNER, states.numel())
    result.sum().backward()
    assert states.grad is not None


def test_a_mixture_says_what_stays_unquantised(tmp_path: Path) -> None:
    model = mixture()
    in_layers, in_experts = stored(model)
    assert in_experts == DEPTH * WEIGHTS
    assert in_layers == DEPTH * (2 * WIDTH * 4 * 32 + 2 * WIDTH * 2 * 32)  # attention; the router is no linear layer
    model.config.save_pretrained(tmp_path)
    options = {"seq_len": TOKENS, "batch_size": 1, "lora_rank": 2, "lora_targets": "q_proj", "dtype": "bfloat16"}
    plain, packed = (step_of(str(tmp_path), **options, quantize=how) for how in ("nf4", "nf4-experts"))
    assert plain.notes[0].startswith("nf4 leaves 0.0 of 0.0 billion weights, the experts, in bfloat16")
    assert packed.notes == ()
    kept, quantised = (run_isolated(partial(simulate_step, step)) for step in (plain, packed))
    saved = kept.breakdown["frozen parameters"] - quantised.breakdown["frozen parameters"]
    assert saved == DEPTH * WEIGHTS * (2 - 1 / 2)
    assert quantised.unreached == ()


def test_experts_in_another_layout_are_refused() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "num_local_experts": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**sizes))
    with pytest.raises(ValueError, match="quantize='nf4-experts': GptOssExperts stores its experts otherwise"):
        Nf4Experts(experts_of(model), torch.bfloat16)
