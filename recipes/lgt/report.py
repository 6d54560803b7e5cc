"""The report of `train_lgt.py`: translated latents and their distances, the checklist, results.json, and pictures."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hf_memopt.recipes.common import results as common
from hf_memopt.recipes.landscapes import autoencoder
from hf_memopt.recipes.lgt.data import LatentBank, Latents, between, describe
from hf_memopt.recipes.lgt.model import LatentTransfer, euler
from hf_memopt.recipes.lgt.options import Options
from hf_memopt.recipes.lgt.step import Run, self_similarity_difference, sliced_wasserstein
from hf_memopt.text_table import align
from hf_memopt.training.repeatable import RandomState
from hf_memopt.units import format_gib

NUM_EVALUATED = 64


@torch.no_grad()
def translate(model: LatentTransfer, latents: Tensor, targets: Tensor, options: Options) -> Tensor:
    """Return latents in their target styles, `(batch, channels, height, width)`, by a model in evaluation mode.

    Integrates from `inference.start_time` on, where that share of the content is left in noise. `cfg_scale` other than
    1 costs a second pass.
    """
    inference = options.inference
    time = torch.full((len(latents),), inference.start_time, device=latents.device)
    given, none = (torch.full_like(targets, value, dtype=torch.bool) for value in (False, True))

    def velocity(latents: Tensor, time: Tensor) -> Tensor:
        towards: Tensor = model.unet(latents, time, targets, given)
        if inference.cfg_scale == 1:
            return towards
        without: Tensor = model.unet(latents, time, targets, none)
        return without + inference.cfg_scale * (towards - without)

    start = between(torch.randn_like(latents), latents, time)
    return euler(velocity, start, time, inference.num_steps, legacy_dt=options.training.legacy_dt)


def evaluate(model: LatentTransfer, bank: LatentBank, held_out: Latents, options: Options) -> dict[str, float]:
    """Return means over target styles, with the same random numbers in every call, which the training's are not.

    `swd` is between translated held-out latents and their target style, `swd_untranslated` the same before translation,
    `swd_floor` between held-out latents of the style and others of it; `ssm` is between translated latents and their
    content, `ssm_others` between contents and other contents.
    """
    state, was_training = RandomState(held_out.latents.device), model.training
    torch.manual_seed(0)
    model.eval()
    found = [_of_style(style, model, bank, held_out, options) for style in range(options.model.num_styles)]
    model.train(was_training)
    state.restore()
    return {name: sum(each[name] for each in found) / len(found) for name in found[0]}


def _of_style(
    style: int, model: LatentTransfer, bank: LatentBank, held_out: Latents, options: Options
) -> dict[str, float]:
    contents = held_out.latents[held_out.styles != style][:NUM_EVALUATED]
    same = held_out.latents[held_out.styles == style][:NUM_EVALUATED]
    translated = translate(model, contents, torch.full((len(contents),), style, device=contents.device), options)
    compared = {"swd": translated, "swd_untranslated": contents, "swd_floor": same}
    figures = {name: _distance(latents, style, bank, options) for name, latents in compared.items()}
    figures["ssm"] = self_similarity_difference(translated, contents).item()
    figures["ssm_others"] = self_similarity_difference(contents.roll(1, dims=0), contents).item()
    return figures


def _distance(latents: Tensor, style: int, bank: LatentBank, options: Options) -> float:
    others = bank.of_styles(torch.full((len(latents),), style, device=latents.device))
    sizes = {"patch_size": options.loss.patch_size, "num_projections": 256, "max_samples": 16_384}
    return sliced_wasserstein(latents, others, **sizes).item()


def draw_panels(model: LatentTransfer, bank: LatentBank, held_out: Latents, options: Options, file: Path) -> None:
    names = options.data.style_subdirs or [f"style {style}" for style in range(options.model.num_styles)]
    columns = images_of(panels(model, bank, held_out, options), options)
    rows = _in_turn(held_out.styles)[: options.inference.num_panels]
    with common.drawn(
        file, len(rows), len(columns), figsize=(1.7 * len(columns), 1.85 * len(rows)), squeeze=False
    ) as grid:
        for column, (title, images) in zip(grid.T, columns.items(), strict=True):
            for axes, image, style in zip(column, images, held_out.styles[rows].tolist(), strict=True):
                target = names[(style + 1) % len(names)]
                text = {"content": names[style], "translated": f"to {target}", "reference": f"other {target}"}[title]
                axes.set_title(text, fontsize=9)
                axes.imshow(image.numpy(), interpolation="nearest")
                axes.set(xticks=[], yticks=[])


def panels(model: LatentTransfer, bank: LatentBank, held_out: Latents, options: Options) -> dict[str, Tensor]:
    """Return the figure's columns, `(num_panels, channels, height, width)`, on the CPU."""
    device = next(model.parameters()).device
    state = RandomState(device)
    torch.manual_seed(0)
    model.eval()
    rows = _in_turn(held_out.styles)[: options.inference.num_panels]
    contents = held_out.latents[rows].to(device)
    targets = (held_out.styles[rows].to(device) + 1) % options.model.num_styles
    columns = {
        "content": contents,
        "translated": translate(model, contents, targets, options),
        "reference": bank.of_styles(targets),
    }
    state.restore()
    return {title: latents.float().cpu() for title, latents in columns.items()}


def images_of(columns: dict[str, Tensor], options: Options) -> dict[str, Tensor]:
    """Return latents as images, `(num, height, width, 3)` from 0 to 1, decoded where there is a decoder."""
    folder = options.inference.vae_path
    return {
        title: as_colours(latents) if folder is None else decode(latents, folder) for title, latents in columns.items()
    }


def as_colours(latents: Tensor) -> Tensor:
    """Return the first three channels as red, green and blue, `(num, height, width, 3)`, on one scale for all."""
    colours = latents[:, :3].expand(-1, 3, -1, -1) if latents.shape[1] < 3 else latents[:, :3]
    return (colours / 6 + 0.5).clamp(0, 1).movedim(1, -1)


@torch.no_grad()
def decode(latents: Tensor, folder: str) -> Tensor:
    """Return images, `(num, height, width, 3)` from 0 to 1, by an AutoencoderKL or that of `landscapes.prepare`."""
    if (Path(folder) / autoencoder.FILE).is_file():
        decoded = autoencoder.Autoencoder.load(Path(folder)).decode(latents)
    else:
        from diffusers import AutoencoderKL

        vae = AutoencoderKL.from_pretrained(folder).eval()
        shift = vae.config.shift_factor or 0.0
        decoded = torch.cat([vae.decode(each[None] / vae.config.scaling_factor + shift).sample for each in latents])
    return (decoded / 2 + 0.5).clamp(0, 1).movedim(1, -1)


def draw_curves(history: common.History, file: Path) -> None:
    with common.drawn(file, 1, 3, figsize=(12, 3.6)) as (losses, style, content):
        common.plot_history(losses, history, "epoch", {"loss": "training"}, "-")
        losses.set(title="Training loss", xlabel="epoch", yscale="log")
        for axes, training, labels in ((style, "style_swd", _STYLE_LABELS), (content, "content_ssm", _CONTENT_LABELS)):
            common.plot_history(axes, history, "epoch", {training: "training"}, "-", color="0.7")
            common.plot_history(axes, history, "epoch", labels, "o-")
            axes.legend(fontsize=8)
        style.set(title="Distance to the target style (SWD)", xlabel="epoch", yscale="log")
        content.set(title="Distance to the content (SSM)", xlabel="epoch", ylim=(0, None))
        for axes in (losses, style, content):
            axes.grid(alpha=0.3, which="both")


_STYLE_LABELS = {
    "swd": "held out, translated",
    "swd_untranslated": "held out, as it is",
    "swd_floor": "held out, of that style",
}
_CONTENT_LABELS = {"ssm": "held out, translated", "ssm_others": "held out, other contents"}


def _in_turn(styles: Tensor) -> Tensor:
    """Return row numbers, one of each style after the other."""
    rank = torch.zeros_like(styles)
    for style in styles.unique():
        rank[styles == style] = torch.arange(int((styles == style).sum()))
    return rank.argsort(stable=True)


logger = logging.getLogger(__name__)

STYLE_LEFT = 0.4  # of the held-out distance to the target style, at most
CONTENT_LOST = 0.5  # of the held-out difference to other contents, at most
STABLE_MEMORY = {"device": 0.01, "host": 0.05}  # growth after the first epoch; host memory also counts caches and code
LONG_EPOCH_S = 300.0  # of 50 to 100 batches
ENOUGH_COVERAGE = 0.25


@dataclass(frozen=True)
class Check:
    name: str
    verdict: Literal["passed", "failed", "not applicable"]
    measured: str


def results(run: Run, num_positions: int, cost: common.RunCost) -> dict[str, Any]:
    options, history = run.options, run.progress.history
    on_cpu = run.accelerator.device.type == "cpu"
    more = {
        "config": options.as_dict(),
        "data": describe(options),
        "final": history[-1],
        "memory_bytes": run.memory_bytes,
        "checklist": checklist(options, history, run.memory_bytes, num_positions, on_cpu=on_cpu),
    }
    return common.run_results(run, cost, **more)


def checklist(
    options: Options, history: common.History, memory_bytes: list[int], num_positions: int, *, on_cpu: bool
) -> list[Check]:
    """Return the claims that the run was to show, and whether it did.

    `memory_bytes` is the most held up to the end of each epoch since the run was started or resumed.
    """
    return [
        Check("training ran without running out of memory", "passed", f"{len(history)} epochs"),
        _memory_is_stable(memory_bytes, "host" if on_cpu else "device"),
        _held_out_loss_falls(options, history),
        _held_out_share("held-out style (SWD) is the target's", history[-1], "swd", "swd_untranslated", STYLE_LEFT),
        _held_out_share("held-out content (SSM) is kept", history[-1], "ssm", "ssm_others", CONTENT_LOST),
        _epoch_time(options, history),
        _coverage(options, num_positions),
        _compilation(options, history),
    ]


def _judged(name: str, holds: bool | None, measured: str) -> Check:
    return Check(name, "not applicable" if holds is None else "passed" if holds else "failed", measured)


def _memory_is_stable(memory_bytes: list[int], where: str) -> Check:
    name = f"{where} memory is stable"
    if len(memory_bytes) < 2:
        return _judged(name, None, "needs two epochs")
    first, last = memory_bytes[0], memory_bytes[-1]
    growth = last / first - 1
    measured = f"at most {format_gib(last)}, {growth:+.1%} since the first epoch"
    return _judged(name, growth <= STABLE_MEMORY[where], measured)


def _held_out_loss_falls(options: Options, history: common.History) -> Check:
    """Judge by evaluations: how far a batch in training is from its target's style says which target was drawn."""
    name, weights = "held-out loss falls", options.loss
    found = [weights.w_style * each["swd"] + weights.w_content * each["ssm"] for each in history if "swd" in each]
    if len(found) < 2:
        return _judged(name, None, f"{found[0]:.4g}; needs two evaluations")
    return _judged(name, found[-1] < found[0], f"{found[0]:.4g} to {found[-1]:.4g} in {len(found)} evaluations")


def _held_out_share(name: str, last: dict[str, float], figure: str, of: str, most: float) -> Check:
    if last[of] == 0:
        return _judged(name, None, f"{of} is 0; needs two different held-out latents of each style")
    share = last[figure] / last[of]
    measured = f"{last[figure]:.4g}, {share:.0%} of {of}'s {last[of]:.4g}; at most {most:.0%}"
    return _judged(name, share <= most, measured)


def _epoch_time(options: Options, history: common.History) -> Check:
    """Leave out the first epoch, which holds allocations, plans and compilation."""
    later = [entry["seconds"] for entry in history[1:]] or [history[0]["seconds"]]
    seconds = sorted(later)[len(later) // 2]
    num_batches = round(history[0]["num_batches"])
    holds = seconds <= LONG_EPOCH_S if 50 <= num_batches <= 100 else None
    measured = f"{seconds:.1f} s for {num_batches} batches of {options.training.batch_size}"
    return _judged(f"an epoch of 50 to 100 batches takes at most {LONG_EPOCH_S:.0f} s", holds, measured)


def _coverage(options: Options, num_positions: int) -> Check:
    training = options.training
    num_samples = training.batch_size * (training.accumulation_steps if training.gradient_cache else 1)
    num_patches = num_samples * num_positions
    share = min(1.0, options.loss.max_samples / num_patches)
    measured = f"{share:.1%} of the {num_patches:,} patches of {num_samples} latents"
    return _judged(f"SWD compares at least {ENOUGH_COVERAGE:.0%} of the patches", share >= ENOUGH_COVERAGE, measured)


def _compilation(options: Options, history: common.History) -> Check:
    name = "the network is compiled"
    if not options.training.use_compile:
        return _judged(name, None, "training.use_compile is false")
    seconds = history[-1]["compile_seconds"]
    return _judged(name, seconds > 0, f"{seconds:.1f} s of compilation, within the first epochs")


def write(results: dict[str, Any], run: Run, output: Path) -> None:
    options, model = run.options, run.best_model()
    common.write_results(results, output)
    costs = common.table([results["training_cost"]], results["device"])
    checks = align([[check.verdict, check.name, check.measured] for check in results["checklist"]])
    logger.info("\n".join(["", *checks, "", costs]))
    if common.can_draw("panels.png"):
        draw_curves(results["history"], output / "curves.png")
        draw_panels(model, run.bank, run.held_out, options, output / "panels.png")
