"""Tests that a frozen base that streams leaves the gradients as they are, to the bit, on every architecture."""

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from architectures import ARCHITECTURES, Workload
from frozen_bases import same, trainable
from own_architectures import OWN_ARCHITECTURES
from torch import Tensor, nn

from hf_memopt import StreamedWeights
from hf_memopt.weights.base import BaseHome

ALL = ARCHITECTURES | OWN_ARCHITECTURES
CASES = [
    (name, checkpointing, autocast)
    for name, checkpointing, autocast in itertools.product(ALL, [False, True], [False, True])
    if ALL[name].can_checkpoint or not checkpointing
]


def freeze(workload: Workload, every_third_trains: bool) -> None:
    """Freeze most parameters: all matrices, or two of three parameters, whatever they are."""
    for number, parameter in enumerate(workload.module.parameters()):
        trains = number % 3 == 2 if every_third_trains else parameter.ndim < 2
        parameter.requires_grad_(trains and parameter.is_floating_point())


def gradients(workload: Workload, autocast: bool, base: StreamedWeights | None) -> list[Tensor]:
    """Return losses and gradients of two steps: the order of visits is learned in the first."""
    found = []
    for step in range(2):
        torch.manual_seed(step)
        with base.stream() if base else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = workload.loss()
        loss.backward()
        found += [loss.detach(), *(each.grad for each in trainable(workload.module) if each.grad is not None)]
        workload.module.zero_grad()
    return found


@pytest.mark.sweep(share=0.1)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("every_third_trains", [False, True], ids=["matrices", "two thirds"])
@pytest.mark.parametrize(("name", "checkpointing", "autocast"), CASES)
def test_gradients_are_those_of_the_resident_run(
    name: str, checkpointing: bool, autocast: bool, every_third_trains: bool
) -> None:
    def build() -> Workload:
        workload = ALL[name].build()
        freeze(workload, every_third_trains)
        if checkpointing:
            workload.checkpoint()
        return workload

    want = gradients(build(), autocast, None)
    workload = build()
    if all(parameter.requires_grad for parameter in workload.module.parameters()):
        pytest.skip("has no matrix")
    base = StreamedWeights(workload.module, home="host", device="cpu", copier=AdversarialCopier("late"))
    assert same(gradients(workload, autocast, base), want)
    with base.stream():
        stays = sum(num_bytes for reason, num_bytes in base.report().resident.items() if reason != "small")
        assert base.report().device_bytes == stays


# Families of models that people adapt, with all that a base may meet at once.
OF_TOKENS = ["llama", "qwen3", "gemma2", "mixtral", "qwen3_moe", "t5", "bart"]
ADAPTED = [*OF_TOKENS, "clip", "vit", "whisper"]
DENOISERS = [name for name in ALL if ALL[name].family == "diffusion"]
MEETINGS = [
    (name, checkpointing, precision, home)
    for name in [*ADAPTED, *DENOISERS]
    for checkpointing in ("none", "non-reentrant", "reentrant")
    for precision in ("float32", "autocast", "bfloat16")
    for home in ("host", "file")
    if (name in ADAPTED or checkpointing != "reentrant") and (name in OF_TOKENS or precision != "bfloat16")
]


@pytest.mark.sweep(share=0.1)
@pytest.mark.parametrize(("name", "checkpointing", "precision", "home"), MEETINGS)
def test_homes_precisions_and_kinds_of_checkpointing(
    name: str, checkpointing: str, precision: str, home: BaseHome
) -> None:
    def build() -> Workload:
        workload = ALL[name].build()
        freeze(workload, every_third_trains=False)
        if precision == "bfloat16":
            workload.module.bfloat16()
        if checkpointing == "reentrant":
            module: Any = workload.module
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            for embedding in (each for each in module.modules() if isinstance(each, nn.Embedding | nn.Conv2d)):
                embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
        elif checkpointing != "none":
            workload.checkpoint()
        return workload

    want = gradients(build(), precision == "autocast", None)
    workload = build()
    base = StreamedWeights(workload.module, home=home, device="cpu")
    assert same(gradients(workload, precision == "autocast", base), want)
