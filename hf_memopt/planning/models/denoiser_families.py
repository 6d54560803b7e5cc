"""The known classes of denoisers, and the sizes of samples: as a run, or else the configuration or script says."""

from typing import Any

from hf_memopt.planning.models.denoiser_config import DenoiserConfig
from hf_memopt.planning.models.denoiser_family import DenoiserFamily, Sizes
from hf_memopt.planning.models.image_families import IMAGES
from hf_memopt.planning.models.model_batches import OWN_STEP, Sample
from hf_memopt.planning.models.video_families import VIDEOS

FAMILIES = IMAGES | VIDEOS


def family_of(config: Any) -> DenoiserFamily:
    if config.class_name not in FAMILIES:
        raise ValueError(
            f"task='denoising': what {config.class_name} takes beside latents is not known, as it is for "
            f"{', '.join(FAMILIES)}; {OWN_STEP}"
        )
    return FAMILIES[config.class_name]


def family_of_model(model: Any) -> DenoiserFamily:
    """Return the family of a model, which may lie in others' wrappers."""
    return next(FAMILIES[type(each).__name__] for each in model.modules() if type(each).__name__ in FAMILIES)


def sizes_of(config: DenoiserConfig, num_samples: int, sample: Sample) -> Sizes:
    family = family_of(config)
    height, width = image_size(config, sample)
    frames = num_frames(config, sample)
    pixels = family.pixels(config)
    latent_frames = (frames - 1) // family.frames + 1 if frames else 1
    return Sizes(num_samples, num_text_tokens(config, sample), latent_frames, height // pixels, width // pixels)


def num_text_tokens(config: DenoiserConfig, sample: Sample) -> int:
    family = family_of(config)
    if sample.text_tokens is None:
        return family.clip_tokens + family.text_tokens
    if not family.text_tokens:
        number = f"always {family.clip_tokens}" if family.clip_tokens else "none"
        raise ValueError(
            f"text_tokens={sample.text_tokens}: text tokens of {config.class_name} are {number}; leave it out"
        )
    return family.clip_tokens + sample.text_tokens


def num_frames(config: DenoiserConfig, sample: Sample) -> int:
    """Return the frames of a video; 0, samples are images."""
    step = family_of(config).frames
    if not step:
        if sample.num_frames is not None:
            raise ValueError(f"num_frames={sample.num_frames}: {config.class_name} learns images; leave it out")
        return 0
    frames = sample.num_frames or getattr(config, "sample_frames", None)
    if frames is None:
        raise ValueError(
            f"num_frames=None: the configuration of {config.class_name} does not say how long videos are; give "
            f"num_frames, a multiple of {step} and one more, such as {10 * step + 1}"
        )
    if frames % step != 1:
        raise ValueError(
            f"num_frames={frames}: {config.class_name} takes a multiple of {step} and one more; use "
            f"{(frames - 1) // step * step + 1}"
        )
    return int(frames)


def image_size(config: DenoiserConfig, sample: Sample) -> tuple[int, int]:
    """Return height and width in pixels."""
    if sample.image_size is not None:
        return _checked_size(config, *sample.image_size)
    own = _own_size(config)
    if own is None:
        raise ValueError(
            f"image_size=None: the configuration of {config.class_name} does not say how large images are; give "
            "image_size, their height and width, such as 1024 or 768x1024"
        )
    pixels = family_of(config).pixels(config)
    return own[0] * pixels, own[1] * pixels


def _own_size(config: DenoiserConfig) -> tuple[int, int] | None:
    if hasattr(config, "sample_height"):
        return config.sample_height, config.sample_width
    own = getattr(config, "sample_size", None)
    if own is None:
        return None
    return (own[0], own[1]) if isinstance(own, list | tuple) else (own, own)


def _checked_size(config: DenoiserConfig, height: int, width: int) -> tuple[int, int]:
    family = family_of(config)
    # UNets halve their inputs a few times, transformers cut them into patches.
    patch = 2 ** (len(config.down_block_types) - 1) if hasattr(config, "down_block_types") else family.patch
    unit = family.pixels(config) * patch
    if height % unit or width % unit:
        raise ValueError(f"image_size={height}x{width}: sides must be multiples of {unit} for {config.class_name}")
    if family.is_square and height != width:
        raise ValueError(f"image_size={height}x{width}: {config.class_name} takes square images alone")
    return height, width
