"""Innocent changes of a training step, and faults that people reported, as `verify` has to judge them.

    PYTHONPATH=tests python tests/exactness/judged_changes.py [WORD ...]

prints, in each precision, the verdict and the largest difference, or the first that is none of rounding, as a multiple
of what rounding may have. Without a number, something differs that has no rounding.
"""

import copy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from late_imports import LateModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_memopt.exactness import VerifyReport, verify

transformers = LateModule("transformers")
PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))

Loss = Callable[[Any, Tensor], Tensor]


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **options)).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


def mixture() -> nn.Module:
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts |= {"shared_expert_intermediate_size": 32, "output_router_logits": True}
    model: nn.Module = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SHAPE, **experts)).train()
    return model


def scorer() -> nn.Module:
    """A model in bfloat16 with one output, whose gradient's rounding is a factor of all gradients."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_labels=1, pad_token_id=0)
    model: nn.Module = transformers.LlamaForSequenceClassification(config).bfloat16().train()
    return model


def score_loss(model: Any, tokens: Tensor) -> Tensor:
    scores: Tensor = model(input_ids=tokens, use_cache=False).logits
    return (scores.float() - scores.detach().float() - 0.1).square().mean()


def own_loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


@dataclass
class Step:
    """Steps of some micro-batches and an update by AdamW, which begin anew with every second call."""

    model: nn.Module
    loss: Loss = own_loss
    dtype: torch.dtype | None = None
    num_micro_batches: int = 2
    lr: float = 2e-5
    decay: float = 0.01
    decay_of_norms: float = 0.0
    schedule: Callable[[int], float] = lambda step: 1.0
    options: dict[str, Any] = field(default_factory=dict)
    after_backward: Callable[[nn.Module, int], None] = lambda model, micro_batch: None
    before_update: Callable[[nn.Module], None] = lambda model: None
    after_update: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None

    def __post_init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> None:
        step = self.num_calls % 2
        self.num_calls += 1
        if step == 0:
            named = list(self.model.named_parameters())
            groups = [
                {"params": [each for name, each in named if ("norm" in name) == is_norm], "weight_decay": decay}
                for is_norm, decay in ((False, self.decay), (True, self.decay_of_norms))
            ]
            self.optimizer = torch.optim.AdamW(groups, lr=self.lr, **self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self.schedule(step)
        for number, tokens in enumerate(TOKENS.chunk(self.num_micro_batches)):
            with self.autocast():
                loss = self.loss(self.model, tokens)
            (loss / self.num_micro_batches).backward()
            self.after_backward(self.model, number)
        self.before_update(self.model)
        self.optimizer.step()
        self.after_update(self.model, self.optimizer)
        self.optimizer.zero_grad()

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast("cpu", self.dtype)


def scaled(factor: float) -> Loss:
    return lambda model, tokens: own_loss(model, tokens) * factor


def on_logits(function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return lambda model, tokens: function(
        model(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )


def cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.float(), labels, **options)


def in_chunks(model: Any, tokens: Tensor, num: int = 4) -> Tensor:
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    parts = zip(hidden.chunk(num), tokens[:, 1:].flatten().chunk(num), strict=True)
    total = sum(
        checkpoint(lambda x, y: cross_entropy(model.lm_head(x), y, reduction="sum"), *part, use_reentrant=False)
        for part in parts
    )
    return total / (tokens.numel() - len(tokens))


def with_labels(change: Callable[[Tensor], Tensor]) -> Loss:
    return lambda model, tokens: model(input_ids=tokens, labels=change(tokens.clone()), use_cache=False).loss


def last_ignored(labels: Tensor) -> Tensor:
    labels[0, -1] = -100
    return labels


def sample_ignored(labels: Tensor) -> Tensor:
    labels[0] = -100
    return labels


def patched(model: nn.Module, kind: type[nn.Module], forward: Callable[..., Tensor]) -> nn.Module:
    """Give a copy's modules of a class another forward function."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, kind):
            module.forward = partial(forward, module)
    return model


def halves(linear: Any, x: Tensor) -> Tensor:
    middle = x.shape[-1] // 2
    return F.linear(x[..., :middle], linear.weight[:, :middle]) + F.linear(x[..., middle:], linear.weight[:, middle:])


def cast(linear: Any, x: Tensor, function: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """Compute in bfloat16 without autocast."""
    return function(SimpleNamespace(weight=linear.weight.bfloat16()), x.bfloat16()).float()


def transposed(linear: Any, x: Tensor) -> Tensor:
    return x @ linear.weight.t()


class ToTf32(torch.autograd.Function):
    """Rounds to the 10 explicit bits of TF32's mantissa, in both directions."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return ToTf32.rounded(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return ToTf32.rounded(gradient)

    @staticmethod
    def rounded(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def in_tf32(linear: Any, x: Tensor) -> Tensor:
    return ToTf32.apply(F.linear(ToTf32.apply(x), ToTf32.apply(linear.weight)))


def division_by_root(norm: Any, x: Tensor) -> Tensor:
    wide = x.float()
    return norm.weight * (wide / (wide.square().sum(-1, keepdim=True) / x.shape[-1] + norm.variance_epsilon).sqrt()).to(
        x.dtype
    )


def eager(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return model


def checkpointed(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    return checkpoint(own_loss, model, tokens, use_reentrant=False, **options)


class HalfInside(torch.autograd.Function):
    """A linear layer in a region of its own autocast, which backward keeps or, as in pytorch#179804, ignores."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, keeps: bool) -> Tensor:
        context.save_for_backward(x, weight)
        context.keeps = keeps
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, weight).float()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        x, weight = context.saved_tensors
        with torch.autocast("cpu", torch.bfloat16, enabled=context.keeps):
            of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
            return (gradient @ weight).float(), of_weight.float(), None


def half_inside(model: nn.Module, keeps: bool) -> nn.Module:
    return patched(
        model, type(model.model.layers[0].mlp.up_proj), lambda linear, x: HalfInside.apply(x, linear.weight, keeps)
    )


def clip_at(last: bool) -> Callable[[nn.Module, int], None]:
    def clip(model: nn.Module, micro_batch: int) -> None:
        if micro_batch or not last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return clip


def clip(norm: float) -> Callable[[nn.Module], None]:
    def clip_all(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), norm)

    return clip_all


def lose_first(model: Any, micro_batch: int) -> None:
    if micro_batch == 0:
        model.model.embed_tokens.weight.grad.zero_()


def to_bfloat16(model: nn.Module, micro_batch: int) -> None:
    for each in model.parameters():
        each.grad.copy_(each.grad.bfloat16())


def states_in_bfloat16(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].copy_(state["exp_avg"].bfloat16())


def decay_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "norm" in name:
                each.mul_(1 - 5e-5 * 0.01)


def stretched(words: str, factor: float) -> dict[str, Any]:
    """Multiply the updates of the weights whose names have these words."""
    before: dict[str, Tensor] = {}

    def keep(model: nn.Module) -> None:
        before.update({name: each.detach().clone() for name, each in model.named_parameters() if words in name})

    def stretch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for name, each in before.items():
                weight = model.get_parameter(name)
                weight.add_(weight - each, alpha=factor - 1)

    return {"before_update": keep, "after_update": stretch}


def stale(model: Any, tokens: Tensor) -> Tensor:
    """Give backward one saved activation in the place of another."""
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() != 3 or tensor.shape[-1] != SHAPE["intermediate_size"]:
            return tensor
        seen.append(tensor)
        return seen[-2] if len(seen) == 3 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return own_loss(model, tokens)


def untied(model: Any) -> nn.Module:
    model = copy.deepcopy(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def coarse_frequencies(model: Any) -> nn.Module:
    model = copy.deepcopy(model)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16().float()
    return model


POSITIONS = torch.arange(64) % 32
BLOCKS = torch.ones(64, 64, dtype=torch.bool).tril() & (torch.arange(64)[:, None] // 32 == torch.arange(64) // 32)


def packed(model: Any, tokens: Tensor, blocks: Tensor = BLOCKS) -> Tensor:
    mask = blocks.expand(len(tokens), 1, 64, 64)
    positions = POSITIONS.expand(len(tokens), -1)
    found: Tensor = model(
        input_ids=tokens, labels=tokens, use_cache=False, position_ids=positions, attention_mask=mask
    ).loss
    return found


def halving(number_of_steps: int, speed: int = 1) -> Callable[[int], float]:
    return lambda step: 1 - speed * step / number_of_steps


Case = tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]


def model_by(function: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    return {"model": function}


EAGER = model_by(eager)
CAST = model_by(lambda model: patched(model, nn.Linear, partial(cast, function=transposed)))
INNOCENT: dict[str, Case] = {
    "fused AdamW": (llama, {"options": {"foreach": False}}, {"options": {"fused": True}}),
    "foreach AdamW": (llama, {"options": {"foreach": False}}, {"options": {"foreach": True}}),
    "fused AdamW, lr 1e-3": (llama, {"lr": 1e-3, "options": {"foreach": False}}, {"options": {"fused": True}}),
    "eager attention": (llama, {}, EAGER),
    "aot_eager": (llama, {}, model_by(partial(torch.compile, backend="aot_eager"))),
    "inductor": (llama, {}, model_by(torch.compile)),
    "one micro-batch": (llama, {}, {"num_micro_batches": 1}),
    "four micro-batches": (llama, {}, {"num_micro_batches": 4}),
    "loss in chunks": (llama, {}, {"loss": in_chunks}),
    "loss by logsumexp": (
        llama,
        {},
        {"loss": on_logits(lambda x, y: (x.float().logsumexp(-1) - x.float().gather(1, y[:, None])[:, 0]).mean())},
    ),
    "products in two halves": (llama, {}, model_by(lambda model: patched(model, nn.Linear, halves))),
    "transposed products": (llama, {}, model_by(lambda model: patched(model, nn.Linear, transposed))),
    "norm by another formula": (
        llama,
        {},
        model_by(lambda model: patched(model, type(model.model.norm), division_by_root)),
    ),
    "checkpointing": (partial(llama, attention_dropout=0.1), {}, {"loss": checkpointed}),
    "eager experts": (mixture, {}, EAGER),
    "eager attention, tied": (partial(llama, tie_word_embeddings=True), {"lr": 1e-3}, EAGER),
    "eager attention, clipping": (llama, {"before_update": clip(0.5)}, EAGER),
    "TF32": (llama, {}, model_by(lambda model: patched(model, nn.Linear, in_tf32))),
    "bfloat16 by casts, in two halves": (
        llama,
        CAST,
        model_by(lambda model: patched(model, nn.Linear, partial(cast, function=halves))),
    ),
    "bfloat16 by casts, one micro-batch": (llama, CAST, {**CAST, "num_micro_batches": 1}),
    "one output in bfloat16, eager attention": (scorer, {"loss": score_loss, "num_micro_batches": 4}, EAGER),
}
FAULTS: dict[str, Case] = {
    "loss times 126/127": (llama, {}, {"loss": scaled(126 / 127)}),
    "loss times 0.97": (llama, {}, {"loss": scaled(0.97)}),
    "label smoothing 0.01": (
        llama,
        {"loss": on_logits(cross_entropy)},
        {"loss": on_logits(partial(cross_entropy, label_smoothing=0.01))},
    ),
    "auxiliary loss dropped": (
        mixture,
        {},
        {
            "loss": lambda model, tokens: (
                model(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=False).loss
            )
        },
    ),
    "one label of 126 lost": (llama, {}, {"loss": with_labels(last_ignored)}),
    "one sample lost": (llama, {}, {"loss": with_labels(sample_ignored)}),
    "clipping before accumulation ends": (llama, {"after_backward": clip_at(True)}, {"after_backward": clip_at(False)}),
    "clipping at another norm": (llama, {"before_update": clip(0.5)}, {"before_update": clip(0.52)}),
    "weight decay on norms": (llama, {"lr": 5e-5}, {"decay_of_norms": 0.01}),
    "weight decay on norms, by hand": (llama, {"lr": 5e-5}, {"after_update": decay_by_hand}),
    "weight decay dropped": (llama, {"lr": 2e-5}, {"decay": 0.0}),
    "schedule at double speed": (llama, {"schedule": halving(20000)}, {"schedule": halving(20000, speed=2)}),
    "learning rate times 1.01": (llama, {}, {"lr": 2.02e-5}),
    "one update times 1.02, eager attention": (
        llama,
        {"lr": 1e-4},
        {**EAGER, **stretched("0.mlp.up_proj", 1.02)},
    ),
    "a norm's update times 1.1, eager attention": (
        llama,
        {"lr": 1e-4},
        {**EAGER, **stretched("0.input_layernorm", 1.1)},
    ),
    "first micro-batch lost in one weight": (llama, {}, {"after_backward": lose_first}),
    "gradients in bfloat16": (llama, {}, {"after_backward": to_bfloat16}),
    "optimizer state in bfloat16": (llama, {}, {"after_update": states_in_bfloat16}),
    "a stale activation": (llama, {}, {"loss": stale}),
    "dropout drawn again": (
        partial(llama, attention_dropout=0.1),
        {},
        {"loss": partial(checkpointed, preserve_rng_state=False)},
    ),
    "tied weights untied": (partial(llama, tie_word_embeddings=True), {}, model_by(untied)),
    "frequencies in bfloat16": (llama, {}, model_by(coarse_frequencies)),
    "packed mask ignored": (
        llama,
        {"loss": packed},
        {"loss": partial(packed, blocks=torch.ones(64, 64, dtype=torch.bool).tril())},
    ),
    "an inner autocast ignored in backward": (
        llama,
        model_by(partial(half_inside, keeps=True)),
        model_by(partial(half_inside, keeps=False)),
    ),
    "eps of AdamW": (llama, {}, {"options": {"eps": 1e-6}}),
}


def judged(case: Case, dtype: torch.dtype | None) -> VerifyReport:
    make, base, change = case
    model, same = make(), lambda model: model
    models = [settings.get("model", same)(model) for settings in (base, change)]
    plain = Step(dtype=dtype, **{**base, "model": models[0]})
    # Inductor's caches give the backward of another autocast dtype.
    with torch.compiler.config.patch(force_disable_caches=True):
        return verify(plain, replace(plain, **{**change, "model": models[1]}))


PRECISIONS_OF = {
    "TF32": ["bfloat16", "float16"],  # lower precision than that of the plain run is a fault in float32
    "an inner autocast ignored in backward": ["float32"],
    "bfloat16 by casts, in two halves": ["float32"],
    "bfloat16 by casts, one micro-batch": ["float32"],
    "one output in bfloat16, eager attention": ["float32"],
}


def precisions_of(name: str) -> list[str]:
    return PRECISIONS_OF.get(name, list(PRECISIONS))


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    print(f"| | {' | '.join(PRECISIONS)} |\n|---|{'---|' * len(PRECISIONS)}")
    for name, case in (INNOCENT | FAULTS).items():
        if words and not any(word in name for word in words):
            continue
        cells = ["-"] * len(PRECISIONS)
        for number, precision in enumerate(PRECISIONS):
            if precision in precisions_of(name):
                found = judged(case, PRECISIONS[precision])
                cells[number] = found.verdict
                if found.worst is not None:
                    decided = found.first if found.verdict == "different" else found.worst
                    cells[number] += f" {decided.excess:.2g}" if decided is not None and decided.excess else ""
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
