"""The classes of denoisers that are known."""

from typing import Any

from hf_memopt.jobs.diffusers_models.denoiser_family import DenoiserFamily
from hf_memopt.jobs.diffusers_models.image_families import IMAGES
from hf_memopt.jobs.diffusers_models.video_families import VIDEOS

FAMILIES = IMAGES | VIDEOS


def family_of(config: Any) -> DenoiserFamily:
    """Return the family of a configuration.

    Raises:
        ValueError: its class is none of `FAMILIES`.
    """
    if config.class_name not in FAMILIES:
        raise ValueError(
            f"task='denoising': what {config.class_name} takes beside latents is not known, as it is for "
            f"{', '.join(FAMILIES)}; write setup and step yourself and call "
            "hf_memopt.estimate_peak_memory"
        )
    return FAMILIES[config.class_name]


def family_of_model(model: Any) -> DenoiserFamily:
    """Return the family of a model, which may lie in others' wrappers."""
    return next(FAMILIES[type(each).__name__] for each in model.modules() if type(each).__name__ in FAMILIES)
