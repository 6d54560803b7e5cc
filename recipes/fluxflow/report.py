"""The report of `train_fluxflow.py`: announcements, results.json, panels and curves."""

import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_memopt.recipes.common import results as common
from hf_memopt.recipes.common.results import RunCost, num_parameters, psnr, table
from hf_memopt.recipes.fluxflow.model import Models
from hf_memopt.recipes.fluxflow.options import Options
from hf_memopt.recipes.fluxflow.step import Run

logger = logging.getLogger(__name__)


def announce(models: Models, options: Options, accelerator: Accelerator, source: str) -> None:
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
    if options.offload.offload != "off" and not options.offload.moves_on(accelerator.device.type):
        logger.info(
            "Activation offloading: nothing to do on a CPU without --disk FOLDER; --cpu_copies tries the copies out"
        )


def results(run: Run, cost: RunCost) -> dict[str, Any]:
    options, models = run.options, run.model
    more = {
        "model": options.model,
        "num_parameters": {name: num_parameters(getattr(models, name)) for name in ("vae", "discriminator")},
        "data": options.data,
        "resolutions": options.resolutions,
        "levers": options.levers,
        "perceptual": None if models.perceptual is None else models.perceptual.description,
    }
    return common.run_results(run, cost, libraries=("diffusers", "lpips"), **more)


@torch.no_grad()
def panels(run: Run, images: list[Tensor]) -> Tensor:
    """Return images, then their reconstructions from mean latents, `(2 * count, 3, height, width)` in [-1, 1]."""
    vae = run.model.vae.eval()
    device = next(vae.parameters()).device
    batch = torch.stack(images).to(device)
    with run.accelerator.autocast():
        reconstructed = vae.decode(vae.encode(batch).latent_dist.mode()).sample
    vae.train()
    return torch.cat([batch, reconstructed.float().clamp(-1, 1)]).cpu()


def write(results: dict[str, Any], panels: Tensor, output: Path) -> None:
    from torchvision.utils import save_image

    results["psnr_db"] = psnr(*panels.chunk(2))
    common.write_results(results, output)
    save_image(panels, output / "panels.png", nrow=len(panels) // 2, normalize=True, value_range=(-1, 1), padding=4)
    if common.can_draw("losses.png"):
        draw(results["history"], output / "losses.png")
    costs = table([results["training_cost"]], results["device"])
    logger.info(f"Reconstructions in panels.png: {results['psnr_db']:.1f} dB\n{costs}")


def draw(history: common.History, file: Path) -> None:
    columns = (("l1", "mse", "lpips", "lpips_load_only"), ("kl",), ("discriminator", "adversarial"))
    with common.drawn(file, 1, len(columns), figsize=(13, 3.6)) as row:
        for axis, names in zip(row, columns, strict=True):
            common.plot_history(axis, history, "step", {name: name.replace("_", " ") for name in names}, "-")
            axis.set(xlabel="global steps")
            axis.grid(alpha=0.3)
            axis.legend()
