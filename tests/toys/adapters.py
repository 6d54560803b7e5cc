"""A tiny Llama with adapters of PEFT on a frozen base, and its gradients with and without streaming."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt import StreamedWeights

VOCABULARY = 96
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
# None of them begins as zeros.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "lora_dropout": 0.1}),
    "dora": ("LoraConfig", {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "ia3": (
        "IA3Config",
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"], "init_ia3_weights": False},
    ),
    "loha": ("LoHaConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_weights": False}),
    "oft": ("OFTConfig", {"oft_block_size": 8, "r": 0, "target_modules": ["q_proj"], "init_weights": False}),
    "vera": ("VeraConfig", {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_weights": False}),
    "miss": ("MissConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_weights": False}),
    "prompt": ("PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}),
    "prefix": ("PrefixTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
}
# Of parameters that no module of their own has, in `tiny_mixtral`.
OF_EXPERTS: dict[str, Any] = {
    "r": 4,
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    "init_lora_weights": False,
}


def tiny_mixtral() -> Any:
    import transformers

    torch.manual_seed(0)
    shape = SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape)).requires_grad_(False)


def tiny_llama(prepare: Callable[[nn.Module], object] = lambda model: None) -> Any:
    """Return a frozen model, after `prepare` has changed it."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    prepare(model)
    return model.requires_grad_(False)


def with_adapters(model: Any, method: str, checkpointing: str = "none") -> Any:
    import peft

    if checkpointing != "none":
        reentrant = checkpointing == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    name, settings = (METHODS | {"lora of experts": ("LoraConfig", OF_EXPERTS)})[method]
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, getattr(peft, name)(**settings))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.02 * torch.randn_like(parameter))
    return adapted.train()


def two_steps(model: Any, base: StreamedWeights | None = None, autocast: bool = False) -> list[Tensor]:
    """Return losses and gradients of two steps: the order of visits is learned in the first."""
    tokens = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(2))
    found = []
    for step in range(2):
        torch.manual_seed(step)
        with base.stream() if base else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found += [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]
        model.zero_grad()
    return found
