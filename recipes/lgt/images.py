"""Pictures of what `train_lgt.py` does to latents."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_memopt.recipes.lgt.config import Config
from hf_memopt.recipes.lgt.data import LatentBank, Latents
from hf_memopt.recipes.lgt.evaluation import translate
from hf_memopt.recipes.lgt.model import LatentTransfer
from hf_memopt.training.repeatable import RandomState


def draw_panels(model: LatentTransfer, bank: LatentBank, held_out: Latents, config: Config, file: Path) -> None:
    """Held-out contents of all styles in turn, each translated to every style, beside latents that have the style."""
    columns = images_of(panels(model, bank, held_out, config), config)
    num_rows = len(next(iter(columns.values())))
    plt = _pyplot()
    figure, grid = plt.subplots(
        num_rows, len(columns), figsize=(1.7 * len(columns), 1.6 * num_rows + 0.3), squeeze=False, layout="constrained"
    )
    for column, (title, images) in zip(grid.T, columns.items(), strict=True):
        column[0].set_title(title, fontsize=9)
        for axes, image in zip(column, images, strict=True):
            axes.imshow(image.numpy(), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
    figure.savefig(file, dpi=100)
    plt.close(figure)


def panels(model: LatentTransfer, bank: LatentBank, held_out: Latents, config: Config) -> dict[str, Tensor]:
    """Latents of each column of the figure, `(num_panels, channels, height, width)`, on the CPU."""
    device = next(model.parameters()).device
    state = RandomState(device)
    torch.manual_seed(0)
    model.eval()
    rows = _in_turn(held_out.styles)[: config.inference.num_panels]
    contents = held_out.latents[rows].to(device)
    columns = {"content": contents}
    for style in range(config.model.num_styles):
        targets = torch.full((len(rows),), style, device=device)
        columns[f"to style {style}"] = translate(model, contents, targets, config)
        columns[f"style {style}"] = bank.of_styles(targets)
    state.restore()
    return {title: latents.float().cpu() for title, latents in columns.items()}


def images_of(columns: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Latents as images, `(num, height, width, 3)` from 0 to 1: decoded where the configuration names a decoder."""
    folder = config.inference.vae_path
    return {
        title: as_colours(latents) if folder is None else decode(latents, folder) for title, latents in columns.items()
    }


def as_colours(latents: Tensor) -> Tensor:
    """The first three channels as red, green and blue, `(num, height, width, 3)`, on one scale for all."""
    colours = latents[:, :3].expand(-1, 3, -1, -1) if latents.shape[1] < 3 else latents[:, :3]
    return (colours / 6 + 0.5).clamp(0, 1).movedim(1, -1)


@torch.no_grad()
def decode(latents: Tensor, folder: str) -> Tensor:
    """Images of latents, `(num, height, width, 3)`, by the AutoencoderKL in a folder."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(folder).eval()
    shift = vae.config.shift_factor or 0.0
    decoded = [vae.decode(each[None] / vae.config.scaling_factor + shift).sample for each in latents]
    return (torch.cat(decoded) / 2 + 0.5).clamp(0, 1).movedim(1, -1)


def draw_curves(history: list[dict[str, float]], file: Path) -> None:
    """Losses by epoch, and the evaluations' distances."""
    plt = _pyplot()
    figure, (losses, style, content) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    epochs = [entry["epoch"] for entry in history]
    losses.plot(epochs, [entry["loss"] for entry in history])
    losses.set(title="Training loss", xlabel="epoch", yscale="log")
    style.plot(epochs, [entry["style_swd"] for entry in history], color="0.7", label="training")
    content.plot(epochs, [entry["content_ssm"] for entry in history], color="0.7", label="training")
    for axes, names in ((style, ("swd", "swd_untranslated", "swd_floor")), (content, ("ssm", "ssm_others"))):
        for name in names:
            points = [(entry["epoch"], entry[name]) for entry in history if name in entry]
            axes.plot(*zip(*points, strict=True), "o-", label=_LABELS[name])
    style.set(title="Distance to the target style (SWD)", xlabel="epoch", yscale="log")
    content.set(title="Distance to the content (SSM)", xlabel="epoch", ylim=(0, None))
    for axes in (losses, style, content):
        axes.grid(alpha=0.3, which="both")
    style.legend(fontsize=8)
    content.legend(fontsize=8)
    figure.savefig(file, dpi=100)
    plt.close(figure)


_LABELS = {
    "swd": "held out, translated",
    "swd_untranslated": "held out, as it is",
    "swd_floor": "held out, of that style",
    "ssm": "held out, translated",
    "ssm_others": "held out, other contents",
}


def _in_turn(styles: Tensor) -> Tensor:
    """Row numbers, one of each style after the other."""
    rank = torch.zeros_like(styles)
    for style in styles.unique():
        rank[styles == style] = torch.arange(int((styles == style).sum()))
    return rank.argsort(stable=True)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
