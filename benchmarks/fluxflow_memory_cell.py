"""One cell of `fluxflow_memory.py` in a process of its own: read as JSON from the command line, printed as JSON."""

import json
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from common import current_device, limit_memory, median_and_spread, step_times_ms
from hf_memopt.recipes.fluxflow_data import rescaled
from hf_memopt.recipes.fluxflow_losses import Weights
from hf_memopt.recipes.fluxflow_model import Models, build_models, stride
from hf_memopt.recipes.fluxflow_options import LeverOptions, LossOptions, ModelOptions, TrainingOptions
from hf_memopt.recipes.fluxflow_step import Gan, make_batch, make_optimizers, step

from hf_memopt import ActivationOffloader

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
SIZES = {
    "real": ModelOptions(channels=[64, 128, 256, 256], discriminator_channels=64, discriminator_layers=4),
    "small": ModelOptions(channels=[32, 64, 64], discriminator_channels=32),
    "toy": ModelOptions(channels=[8, 8], discriminator_channels=4, discriminator_layers=1),
}
R1_INTERVAL = 16
FIRST_SAMPLE = 100  # by then every resolution has had R1


def main(text: str) -> None:
    """Print what was measured as the last line; that memory was not enough is a result."""
    cell = json.loads(text)
    device = current_device()
    limit_memory(cell["card_gb"])
    try:
        found = (growth if cell["part"] == "growth" else one_step)(cell, device)
    except torch.OutOfMemoryError as error:
        found = {"error": f"OutOfMemoryError: {error}"}
    print(json.dumps(found))


def make_gan(cell: dict[str, Any], device: torch.device) -> Gan:
    """As the recipe makes it: random weights, LPIPS' too, which changes neither memory nor time."""
    lever_flags = dict(VARIANTS[cell["variant"]])
    offloader = ActivationOffloader(mode="all") if lever_flags.pop("offload", False) else None
    levers = LeverOptions(**lever_flags)
    losses = LossOptions(lpips_weights="random", lpips_weight=0.1 if cell["lpips"] else 0.0)
    torch.manual_seed(0)
    models = Models(*(each and each.to(device) for each in build_models(SIZES[cell["size"]], losses, levers)))
    autocast = (lambda: torch.autocast(device.type, torch.bfloat16)) if cell["bf16"] else nullcontext
    optimizers = make_optimizers(models, TrainingOptions())
    return Gan(models, optimizers, losses, levers, autocast=autocast, offloader=offloader)


def one_step(cell: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Peak and time of steps on one batch, each with R1, whose step holds most."""
    gan = make_gan(cell, device)
    images = make_batch(cell["batch_size"], cell["resolution"], device)
    torch.manual_seed(1)
    norms = {name: float(value) for name, value in run(gan, images, with_r1=True).items() if "grad_norm" in name}
    for _ in range(cell["warmup_steps"]):
        run(gan, images, with_r1=True)
    if device.type == "cpu":
        return norms
    torch.accelerator.reset_peak_memory_stats(device)
    limits = {"max_steps": cell["steps"], "max_seconds": 10.0}
    times = step_times_ms(lambda: run(gan, images, with_r1=True), device, **limits)
    return {**norms, "step_ms": median_and_spread(times), **memory(device)}


def growth(cell: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Memory between steps of changing resolution, early and at the end."""
    gan = make_gan(cell, device)
    images = make_batch(cell["batch_size"], cell["resolution"], device)
    first: dict[str, Any] = {}
    begun, number = time.perf_counter(), 0
    while number < cell["steps"] and time.perf_counter() - begun < cell["max_seconds"]:
        scale = cell["scales"][number % len(cell["scales"])]
        run(gan, rescaled(images, scale, stride(gan.models.vae)), with_r1=number % R1_INTERVAL == 0)
        number += 1
        if cell["empty_cache_every"] and number % cell["empty_cache_every"] == 0:
            torch.accelerator.empty_cache()
        if number == min(FIRST_SAMPLE, cell["steps"]):
            first = memory(device)
    seconds = time.perf_counter() - begun
    return {"num_steps": number, "ms_per_step": 1e3 * seconds / number, "first": first, "last": memory(device)}


def run(gan: Gan, images: torch.Tensor, with_r1: bool) -> dict[str, torch.Tensor]:
    return step(gan, images, WEIGHTS, with_r1=with_r1)


def memory(device: torch.device) -> dict[str, int]:
    """The allocator's books; nothing on the CPU."""
    if device.type == "cpu":
        return {}
    stats = torch.accelerator.memory_stats(device)
    return {
        "peak_bytes": stats["allocated_bytes.all.peak"],
        "allocated_bytes": stats["allocated_bytes.all.current"],
        "reserved_bytes": stats["reserved_bytes.all.current"],
        "inactive_split_bytes": stats.get("inactive_split_bytes.all.current", 0),
        "num_alloc_retries": stats.get("num_alloc_retries", 0),
    }


if __name__ == "__main__":
    main(sys.argv[1])
