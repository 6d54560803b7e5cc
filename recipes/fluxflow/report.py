"""What a run of `train_fluxflow.py` says and leaves: announcements, results.json, panels and curves."""

import importlib.util
import json
import logging
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_memopt.recipes.common.cost import Cost, table
from hf_memopt.recipes.fluxflow.model import Models
from hf_memopt.recipes.fluxflow.options import Options
from hf_memopt.recipes.fluxflow.step import Gan

logger = logging.getLogger(__name__)


def announce(models: Models, options: Options, accelerator: Accelerator, source: str) -> None:
    """Log what is about to happen."""
    ratios = len(options.data.aspect_ratios)
    logger.info(
        f"Data: {source}, trained at {', '.join(map(str, options.resolutions))}, {ratios} aspect ratio(s); "
        f"{options.training.training_steps * len(options.resolutions)} update(s) of either network per global step"
    )
    logger.info(
        f"Models: VAE with {num_parameters(models.vae):,} parameters, discriminator with "
        f"{num_parameters(models.discriminator):,} on {accelerator.device}, {accelerator.num_processes} process(es), "
        f"mixed precision {accelerator.mixed_precision}"
    )
    if models.perceptual is not None:
        log = logger.warning if models.perceptual.name != "lpips" else logger.info
        log(f"Perceptual loss: {models.perceptual.description}")
    if accelerator.device.type == "cpu" and options.offload.offload != "off" and not options.offload.cpu_copies:
        logger.info("Activation offloading: nothing to do on a CPU; --cpu_copies tries the copies out")


def num_parameters(model: nn.Module) -> int:
    """Numbers that training changes."""
    return sum(parameter.numel() for parameter in model.parameters())


def results(
    options: Options, accelerator: Accelerator, models: Models, history: list[dict[str, float]], cost: Cost
) -> dict[str, Any]:
    """What a finished training run leaves in `results.json`."""
    device = accelerator.device
    return {
        "mode": options.offload.offload,
        "model": asdict(options.model),
        "num_parameters": {"vae": num_parameters(models.vae), "discriminator": num_parameters(models.discriminator)},
        "data": asdict(options.data),
        "resolutions": options.resolutions,
        "levers": asdict(options.levers),
        "perceptual": None if models.perceptual is None else models.perceptual.description,
        "device": "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "versions": {name: version(name) for name in ("torch", "diffusers", "accelerate", "lpips")},
        "history": history,
        "training_cost": cost,
        "compared_costs": [],
    }


@torch.no_grad()
def panels(gan: Gan, images: list[Tensor]) -> Tensor:
    """Images and below them their reconstructions from mean latents, `(2 * count, 3, height, width)` in [-1, 1]."""
    vae = gan.models.vae.eval()
    device = next(vae.parameters()).device
    batch = torch.stack(images).to(device)
    with gan.autocast():
        reconstructed = vae.decode(vae.encode(batch).latent_dist.mode()).sample
    vae.train()
    return torch.cat([batch, reconstructed.float().clamp(-1, 1)]).cpu()


def psnr(panels: Tensor) -> float:
    """Peak signal-to-noise ratio of the reconstructions in dB, over all of them."""
    images, reconstructed = panels.chunk(2)
    return float(10 * torch.log10(4 / (images - reconstructed).square().mean()))


def write(results: dict[str, Any], panels: Tensor, output: Path) -> None:
    """`results.json`, `panels.png`, and `losses.png` where matplotlib is installed; the log gets the cost."""
    from torchvision.utils import save_image

    results["psnr_db"] = psnr(panels)
    (output / "results.json").write_text(json.dumps(results, indent=2, default=asdict) + "\n")
    save_image(panels, output / "panels.png", nrow=len(panels) // 2, normalize=True, value_range=(-1, 1), padding=4)
    if importlib.util.find_spec("matplotlib") is None:
        logger.info("No losses.png: it needs matplotlib, which the extra 'report' installs")
    else:
        draw(results["history"], output / "losses.png")
    logger.info(f"Reconstructions in panels.png: {results['psnr_db']:.1f} dB\n{table(results)}")


def draw(history: list[dict[str, float]], file: Path) -> None:
    """Losses by global step. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = (("l1", "mse", "lpips", "lpips_load_only"), ("kl",), ("discriminator", "adversarial"))
    figure, axes = plt.subplots(1, len(columns), figsize=(13, 3.6), layout="constrained")
    for axis, names in zip(axes, columns, strict=True):
        for name in names:
            points = [(entry["step"], entry[name]) for entry in history if name in entry]
            if points:
                axis.plot(*zip(*points, strict=True), label=name.replace("_", " "))
        axis.set(xlabel="global steps")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(file, dpi=100)
    plt.close(figure)
