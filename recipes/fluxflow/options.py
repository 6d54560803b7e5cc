"""The flags of `train_fluxflow.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from hf_memopt.ranges import Range
from hf_memopt.recipes.common.flags import Count, CountOrZero, NotNegative, Positive, flag, read_options
from hf_memopt.recipes.common.options import OffloadOptions, RunOptions, check_folder, check_offloading

Ratio = Annotated[float, Range(above=0, why=": width / height, such as 0.75 1 1.33")]
Decay = Annotated[float, Range(at_least=0, below=1, why="; 0 makes no average")]
MIN_LPIPS_SIZE = 16  # VGG halves it four times


@dataclass
class ModelOptions:
    vae: str | None = flag(
        None, "hub id or folder of a diffusers AutoencoderKL, or of a pipeline, to go on with; else new"
    )
    channels: list[Count] = flag([32, 64, 64], "of a new VAE, by level; each after the first halves")
    layers_per_block: Count = flag(1, "residual blocks of a new VAE's encoder at each level")
    latent_channels: Count = flag(4, "of a new VAE")
    discriminator_channels: Count = flag(32, "of the first layer; doubled at each of the next")
    discriminator_layers: Count = flag(3, "convolutions that halve the image")
    spectral_norm: bool = flag(True, "spectral normalisation of the discriminator's weights")


@dataclass
class DataOptions:
    image_folder: str | None = flag(None, "folder of images; without it and --dataset landscapes are drawn")
    dataset: str | None = flag(None, "name or folder of a dataset that `datasets` can load, or has saved to disk")
    dataset_config: str | None = flag(None, "configuration of the dataset")
    split: str = flag("train", "split of the dataset")
    image_column: str = flag("image", "column of the dataset that holds the images")
    streaming: bool = flag(False, "read the dataset as it comes instead of downloading it first")
    shuffle_buffer: Count = flag(1000, "streaming: images among which the next one is drawn")
    num_drawn: Count = flag(256, "images that are drawn where no others are given")
    resolution: Count = flag(64, "images are cropped and scaled to as many pixels as a square of this side has")
    aspect_ratios: list[Ratio] = flag([1.0], "width / height of the buckets; an image goes to the nearest")
    num_workers: CountOrZero = flag(0, "processes that read and decode images")
    prefetch_factor: Count | None = flag(None, "batches that each of them reads ahead; torch's default is 2")


@dataclass
class LossOptions:
    detail_weight: NotNegative = flag(0.5, "of the L1 error of what a 3 x 3 blur removes, beside 1 for what it leaves")
    mse_weight: NotNegative = flag(0.1, "of the mean squared error")
    lpips_weight: NotNegative = flag(0.1, "of LPIPS; 0 leaves it out")
    lpips_weights: Literal["auto", "imagenet", "random"] = flag(
        "auto", "of LPIPS' VGG16; auto: ImageNet's if torch hub's cache has them, else random, which measures load only"
    )
    kl_weight: NotNegative = flag(1e-3, "of the KL divergence, mean over latents, when warmed up")
    kl_warmup_steps: CountOrZero = flag(5000, "steps over which that weight rises, along a cosine; 0: at once")
    free_bits: NotNegative = flag(0.0, "KL divergence of a latent, in nats, that costs nothing")
    adversarial_weight: NotNegative = flag(0.5, "of the hinge loss in the VAE's loss; only its decoder sees it")
    adversarial_warmup_steps: CountOrZero = flag(0, "steps over which that weight rises, along a cosine; 0: at once")
    r1_gamma: NotNegative = flag(5.0, "half of it weighs the R1 penalty")
    r1_interval: Count = flag(16, "discriminator updates from one R1 penalty to the next")


@dataclass
class TrainingOptions(RunOptions):
    output_dir: str = flag("outputs/fluxflow", "folder for the VAE, checkpoints, results.json and panels.png")
    max_steps: Count = flag(400, "global steps: one for each batch, however many updates it makes")
    batch_size: Count = flag(4, "images per update and process")
    micro_batch_size: CountOrZero = flag(0, "images per forward pass, of which an update has several; 0: all at once")
    training_steps: Count = flag(1, "times that a batch is trained on, at all resolutions")
    resolutions: list[Count] = flag([], "at which each batch is trained, --resolution or less (that alone)")
    learning_rate: NotNegative = flag(5e-4, "of the VAE's AdamW")
    discriminator_learning_rate: NotNegative = flag(1e-4, "of the discriminator's AdamW")
    warmup_steps: CountOrZero = flag(10, "steps until the learning rates have reached their peaks")
    max_grad_norm: Positive = flag(1.0, "clip the VAE's and the discriminator's gradients to this norm")
    ema_decay: Decay = flag(0.999, "of the average of the VAE's weights, per update, at most; 0: no average")
    log_every: Count = flag(10, "steps between log lines")
    checkpointing_steps: CountOrZero = flag(0, "steps between checkpoints; 0: only when interrupted, and by an error")
    detect_leaks: Literal["off", "warn", "raise"] = flag("off", "what to do about memory that stays behind")


@dataclass
class LeverOptions:
    lpips_gradient: Literal["plain", "checkpoint", "early"] = flag(
        "early", "LPIPS in backward; computed again there; or its gradient taken at once, image by image"
    )
    decode: Literal["once", "twice"] = flag("once", "for both losses, with two vector-Jacobian products, or for each")
    freeze_discriminator: bool = flag(True, "no gradients of the discriminator in the VAE's update, where none is used")
    checkpoint_vae: bool = flag(False, "keep only the inputs of the VAE's blocks and compute the rest again")
    checkpoint_discriminator: bool = flag(False, "the same for the discriminator, without spectral normalisation only")
    ema_on_cpu: bool = flag(False, "keep the average of weights in host memory")
    expandable_segments: bool = flag(False, "CUDA: let the allocator grow its segments, against fragmentation")


class Options(NamedTuple):
    model: ModelOptions
    data: DataOptions
    losses: LossOptions
    training: TrainingOptions
    levers: LeverOptions
    offload: OffloadOptions

    @property
    def output_dir(self) -> str:
        return self.training.output_dir

    @property
    def resolutions(self) -> list[int]:
        return self.training.resolutions or [self.data.resolution]


def parse(description: str, arguments: Sequence[str] | None = None, compared: Sequence[str] = ()) -> Options:
    """Read the command line; `compared` are modes of offloading, none for training, which needs a folder of its own."""
    options = read_options(Options, description, arguments)
    _check_resolutions(options)
    _check_data(options.data)
    _check_levers(options, compared)
    if not compared:
        check_folder(options.training.output_dir, options.training.resume_from_checkpoint)
    return options


def _check_resolutions(options: Options) -> None:
    """Refuse sizes that LPIPS or the buckets cannot take. A loaded VAE's own stride is not known yet."""
    least = MIN_LPIPS_SIZE if options.losses.lpips_weight else 1
    for resolution in (options.data.resolution, *options.resolutions):
        if not least <= resolution <= options.data.resolution:
            raise ValueError(
                f"resolutions: {resolution} must lie between {least}, the smallest image of these losses, and "
                f"resolution={options.data.resolution}"
            )


def _check_data(data: DataOptions) -> None:
    if data.image_folder is not None and data.dataset is not None:
        raise ValueError(f"image_folder={data.image_folder!r} and dataset={data.dataset!r}: give one of them")
    if data.streaming and data.image_folder is None and data.dataset is None:
        raise ValueError("streaming=True needs --dataset or --image_folder; drawn images are in memory")
    if data.prefetch_factor is not None and not data.num_workers:
        raise ValueError(f"prefetch_factor={data.prefetch_factor} needs --num_workers; without them nobody reads ahead")


def _check_levers(options: Options, compared: Sequence[str]) -> None:
    remedy = "the inputs of checkpointed blocks; add --checkpoint_vae"
    check_offloading(options.offload, compared, checkpointed=options.levers.checkpoint_vae, remedy=remedy)
    if options.levers.checkpoint_discriminator and options.model.spectral_norm:
        raise ValueError(
            "checkpoint_discriminator=True with spectral_norm=True: each forward pass advances spectral "
            "normalisation's power iteration, and computing again would advance it once more; leave one of them out"
        )
