"""What `benchmarks.fluxflow.memory` measures: steps of a variant, and memory over many steps."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import Row
from benchmarks.common import current_device, limit_memory
from benchmarks.timing import first_step_s, timed
from hf_memopt import ActivationOffloader
from hf_memopt.recipes.fluxflow.data import rescaled
from hf_memopt.recipes.fluxflow.losses import Weights
from hf_memopt.recipes.fluxflow.model import Models, build_models, stride
from hf_memopt.recipes.fluxflow.options import LeverOptions, LossOptions, ModelOptions, TrainingOptions
from hf_memopt.recipes.fluxflow.step import Gan, make_batch, make_optimizers, step

WEIGHTS = Weights(kl=1e-3, adversarial=0.5)
SEED = {"decode": "twice", "freeze_discriminator": False}
# The order is that of the report; the seed's levers come before this library's.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {**SEED, "lpips_gradient": "plain"},
    "seed": {**SEED, "lpips_gradient": "checkpoint"},
    "ours": {},
    "ours checkpointed": {"checkpoint_vae": True},
    "ours offloaded": {"offload": True},
}
AGAIN = "plain again"  # after the others: how far two runs of the same differ
SIZES = {
    "real": ModelOptions(channels=[64, 128, 256, 256], discriminator_channels=64, discriminator_layers=4),
    "small": ModelOptions(channels=[32, 64, 64], discriminator_channels=32),
    "toy": ModelOptions(channels=[8, 8], discriminator_channels=4, discriminator_layers=1),
}
R1_INTERVAL = 16
FIRST_SAMPLE = 100  # by then every resolution has had R1


def measure(settings: dict[str, Any], folder: Path) -> Row:
    """One part of the benchmark."""
    device = current_device()
    limit_memory(settings["card_gb"])
    return (growth if settings["part"] == "growth" else one_step)(settings, device)


def make_gan(settings: dict[str, Any], device: torch.device) -> Gan:
    """As the recipe makes it: random weights, LPIPS' too, which changes neither memory nor time."""
    lever_flags = dict(VARIANTS["plain" if settings["variant"] == AGAIN else settings["variant"]])
    offloader = ActivationOffloader(mode="all") if lever_flags.pop("offload", False) else None
    levers = LeverOptions(**lever_flags)
    losses = LossOptions(lpips_weights="random", lpips_weight=0.1 if settings["lpips"] else 0.0)
    torch.manual_seed(0)
    models = Models(*(each and each.to(device) for each in build_models(SIZES[settings["size"]], losses, levers)))
    autocast = (lambda: torch.autocast(device.type, torch.bfloat16)) if settings["bf16"] else nullcontext
    optimizers = make_optimizers(models, TrainingOptions())
    return Gan(models, optimizers, losses, levers, autocast=autocast, offloader=offloader)


def one_step(settings: dict[str, Any], device: torch.device) -> Row:
    """Peak and time of steps on one batch, each with R1, whose step holds most; gradients' norms of the first."""
    gan = make_gan(settings, device)
    images = make_batch(settings["batch_size"], settings["resolution"], device)
    torch.manual_seed(1)
    figures: dict[str, torch.Tensor] = {}
    found: Row = {"first_step_s": first_step_s(lambda: figures.update(run(gan, images, with_r1=True)), device)}
    found |= {name: float(value) for name, value in figures.items() if "grad_norm" in name}
    for _ in range(settings["warmup_steps"]):
        run(gan, images, with_r1=True)
    limits = {"max_steps": settings["steps"], "max_seconds": settings["seconds_per_cell"]}
    return found | timed(lambda: run(gan, images, with_r1=True), device, **limits)


def growth(settings: dict[str, Any], device: torch.device) -> Row:
    """Memory between steps of changing resolution, early and at the end."""
    gan = make_gan(settings, device)
    images = make_batch(settings["batch_size"], settings["resolution"], device)
    first: dict[str, int] = {}
    begun, number = time.perf_counter(), 0
    while number < settings["steps"] and time.perf_counter() - begun < settings["seconds_per_cell"]:
        scale = settings["scales"][number % len(settings["scales"])]
        run(gan, rescaled(images, scale, stride(gan.models.vae)), with_r1=number % R1_INTERVAL == 0)
        number += 1
        if settings["empty_cache_every"] and number % settings["empty_cache_every"] == 0:
            torch.accelerator.empty_cache()
        if number == min(FIRST_SAMPLE, settings["steps"]):
            first = memory(device)
    last = memory(device)
    seconds = time.perf_counter() - begun
    return {"num_steps": number, "ms_per_step": 1e3 * seconds / number, "first": first, "last": last}


def run(gan: Gan, images: torch.Tensor, with_r1: bool) -> dict[str, torch.Tensor]:
    return step(gan, images, WEIGHTS, with_r1=with_r1)


def memory(device: torch.device) -> dict[str, int]:
    """The allocator's books between steps; nothing on the CPU."""
    if device.type == "cpu":
        return {}
    torch.accelerator.synchronize(device)
    stats = torch.accelerator.memory_stats(device)
    return {
        "peak_bytes": stats["allocated_bytes.all.peak"],
        "allocated_bytes": stats["allocated_bytes.all.current"],
        "reserved_bytes": stats["reserved_bytes.all.current"],
        "inactive_split_bytes": stats.get("inactive_split_bytes.all.current", 0),
        "num_alloc_retries": stats.get("num_alloc_retries", 0),
    }
