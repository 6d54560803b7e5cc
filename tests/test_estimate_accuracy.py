"""Estimates of real training steps on the CPU: peaks within 1 % of what live storages hold, in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, BATCH, VOCABULARY, Workload, make_model, to_random_target
from estimate_runs import MakeOptimizer, Setup, accumulating, architecture, deviations, step, training
from torch import Tensor, nn

from hf_memopt import apply_selective_checkpointing

# Layer drop is random, and the number of masked places depends on values: these have upper bounds only.
BY_CHANCE = {"hubert", "wav2vec2", "whisper"}
PLAIN = [name for name in ARCHITECTURES if name not in BY_CHANCE]


def reentrant(workload: Workload) -> None:
    workload.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


def selective(workload: Workload) -> None:
    apply_selective_checkpointing(workload.module)


def frozen(workload: Workload) -> None:
    """All but the upper half of the parameters."""
    parameters = list(workload.module.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)


def lora(checkpointing: bool = False) -> Setup:
    from peft import LoraConfig, get_peft_model

    def build() -> Workload:
        model = make_model("LlamaForCausalLM", hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                           num_attention_heads=4, vocab_size=VOCABULARY)  # fmt: skip
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        if checkpointing:
            adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids = torch.randint(5, VOCABULARY, (BATCH, 24))
        return Workload(adapted.train(), lambda: adapted(input_ids=ids, labels=ids).loss)

    return training(build)


class Velocity(nn.Module):
    """A vector field and its flow in 10 Euler steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(33, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 32))

    def forward(self, x: Tensor) -> Tensor:
        for index in range(10):
            time = torch.full_like(x[:, :1], index / 10)
            x = x + self.net(torch.cat([x, time], dim=1)) / 10
        return x


def ode() -> Setup:
    def build() -> Workload:
        model, noise = Velocity(), torch.randn(64, 32)
        return Workload(model, to_random_target(lambda: model(noise)))

    return training(build)


def penalised() -> Setup:
    """A critic with an R1 penalty: a gradient of a gradient."""

    def build() -> Workload:
        critic = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.LazyLinear(1))
        images = torch.randn(4, 3, 16, 16)
        critic(images)

        def loss() -> Tensor:
            real = images.detach().requires_grad_()
            scores = critic(real)
            (gradient,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
            return nn.functional.softplus(-scores).mean() + gradient.square().sum(dim=(1, 2, 3)).mean()

        return Workload(critic, loss)

    return training(build)


def optimizer(make: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    return lambda parameters: make(parameters, **options)


def checkpointed(name: str, prepare: Callable[[Workload], Any] = Workload.checkpoint) -> Setup:
    return architecture(name, prepare=prepare)


CASES: dict[str, tuple[Setup, Callable[[Any], object]]] = {
    **{name: (architecture(name), step) for name in PLAIN},
    **{f"{name}, checkpointed": (checkpointed(name), step) for name in PLAIN if ARCHITECTURES[name].can_checkpoint},
    "llama, reentrant checkpoints": (checkpointed("llama", reentrant), step),
    "vit, reentrant checkpoints": (checkpointed("vit", reentrant), step),
    "llama, selective checkpoints": (checkpointed("llama", selective), step),
    "gpt2, selective checkpoints": (checkpointed("gpt2", selective), step),
    "llama, lower half frozen": (architecture("llama", prepare=frozen), step),
    "bert, lower half frozen": (architecture("bert", prepare=frozen), step),
    "llama, LoRA": (lora(), step),
    "llama, LoRA, checkpointed": (lora(checkpointing=True), step),
    "llama, 3 micro-batches": (architecture("llama"), accumulating),
    "resnet, 3 micro-batches": (architecture("resnet"), accumulating),
    "gpt2, AdamW foreach": (architecture("gpt2", make_optimizer=optimizer(torch.optim.AdamW, foreach=True)), step),
    "gpt2, AdamW fused": (architecture("gpt2", make_optimizer=optimizer(torch.optim.AdamW, fused=True)), step),
    "gpt2, SGD": (architecture("gpt2", make_optimizer=optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)), step),
    "gpt2, Adafactor": (architecture("gpt2", make_optimizer=optimizer(torch.optim.Adafactor)), step),
    "flow in 10 Euler steps": (ode(), step),
    "critic with R1 penalty": (penalised(), step),
}
QUICK = {"llama, checkpointed", "gpt2, AdamW foreach", "vit", "llama, LoRA", "critic with R1 penalty", "unet2d"}


def cases() -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", cases())
def test_the_peaks_of_a_real_run(name: str) -> None:
    for deviation in deviations(*CASES[name]):
        assert abs(deviation) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_CHANCE))
def test_where_chance_decides_the_peak_is_no_lower_than_that_of_a_real_run(name: str) -> None:
    overall, _ = deviations(architecture(name))
    assert 0 <= overall < 0.25
