"""How well `train_lgt.py` transfers style: translated latents, and their distances to style and content."""

import torch
from torch import Tensor

from hf_memopt.recipes.lgt.config import Config
from hf_memopt.recipes.lgt.data import LatentBank, Latents
from hf_memopt.recipes.lgt.losses import self_similarity_difference, sliced_wasserstein
from hf_memopt.recipes.lgt.model import LatentTransfer, euler
from hf_memopt.recipes.lgt.step import between
from hf_memopt.training.repeatable import RandomState

NUM_EVALUATED = 64


@torch.no_grad()
def translate(model: LatentTransfer, latents: Tensor, targets: Tensor, config: Config) -> Tensor:
    """Latents in their target styles, `(batch, channels, height, width)`; the model should be in evaluation mode.

    Integrates from `inference.start_time` on, where that share of the content is left in noise. With `cfg_scale` s, the
    velocity is that without a style plus s times the difference to that with it, at the cost of a second pass.
    """
    inference = config.inference
    time = torch.full((len(latents),), inference.start_time, device=latents.device)
    given, none = (torch.full_like(targets, value, dtype=torch.bool) for value in (False, True))

    def velocity(latents: Tensor, time: Tensor) -> Tensor:
        towards: Tensor = model.unet(latents, time, targets, given)
        if inference.cfg_scale == 1:
            return towards
        without = model.unet(latents, time, targets, none)
        return without + inference.cfg_scale * (towards - without)

    start = between(torch.randn_like(latents), latents, time)
    return euler(velocity, start, time, inference.num_steps, legacy_dt=config.training.legacy_dt)


def evaluate(model: LatentTransfer, bank: LatentBank, held_out: Latents, config: Config) -> dict[str, float]:
    """Means over target styles, with the same random numbers in every call, which the training's are not.

    Returns:
        `swd`: between translated held-out latents and the style that they should have; `swd_untranslated`: the same
        before translation; `swd_floor`: between held-out latents that have the style and others that do; `ssm`: between
        translated latents and their content; `ssm_others`: between contents and other contents.
    """
    state, was_training = RandomState(held_out.latents.device), model.training
    torch.manual_seed(0)
    model.eval()
    found = [_of_style(style, model, bank, held_out, config) for style in range(config.model.num_styles)]
    model.train(was_training)
    state.restore()
    return {name: sum(each[name] for each in found) / len(found) for name in found[0]}


def _of_style(
    style: int, model: LatentTransfer, bank: LatentBank, held_out: Latents, config: Config
) -> dict[str, float]:
    contents = held_out.latents[held_out.styles != style][:NUM_EVALUATED]
    same = held_out.latents[held_out.styles == style][:NUM_EVALUATED]
    translated = translate(model, contents, torch.full((len(contents),), style, device=contents.device), config)
    compared = {"swd": translated, "swd_untranslated": contents, "swd_floor": same}
    figures = {name: _distance(latents, style, bank, config) for name, latents in compared.items()}
    figures["ssm"] = self_similarity_difference(translated, contents).item()
    figures["ssm_others"] = self_similarity_difference(contents.roll(1, dims=0), contents).item()
    return figures


def _distance(latents: Tensor, style: int, bank: LatentBank, config: Config) -> float:
    """To as many training latents of the style, along many directions."""
    others = bank.of_styles(torch.full((len(latents),), style, device=latents.device))
    sizes = {"patch_size": config.loss.patch_size, "num_projections": 256, "max_samples": 16_384}
    return sliced_wasserstein(latents, others, **sizes).item()
