"""The configuration of `train_lgt.py`, in sections."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NamedTuple

from hf_memopt.ranges import Range
from hf_memopt.recipes.common.flags import (
    Count,
    CountOrZero,
    HeldOut,
    NotNegative,
    Positive,
    Seed,
    Share,
    TwoOrMore,
    flag,
    read_options,
)
from hf_memopt.recipes.common.options import OffloadOptions, check_offloading

FourOrMore = Annotated[int, Range(at_least=4, whole=True)]
UpToOne = Annotated[float, Range(above=0, at_most=1)]
EightOrMore = Annotated[int, Range(at_least=8, whole=True)]


@dataclass
class ModelOptions:
    latent_channels: Count = flag(4, "channels of the latents")
    base_channels: FourOrMore = flag(128, "width at full resolution; twice and four times as wide below")
    style_dim: Count = flag(256, "width of style embeddings")
    time_dim: TwoOrMore = flag(256, "width of time embeddings")
    num_styles: TwoOrMore = flag(2, "styles that have embeddings")
    num_encoder_blocks: Count = flag(2, "residual blocks per resolution on the way down")
    num_decoder_blocks: Count = flag(3, "style-dependent blocks per resolution on the way up")
    style_noise: NotNegative = flag(0.05, "standard deviation of the noise on style embeddings in training")


@dataclass
class LossOptions:
    w_style: NotNegative = flag(40.0, "weight of the sliced Wasserstein distance to the target style's patches")
    w_content: NotNegative = flag(0.8, "weight of the difference in self-similarity to the content")
    patch_size: Count = flag(3, "side of a patch, odd")
    num_projections: Count = flag(64, "random directions of the sliced Wasserstein distance")
    max_samples: Count = flag(8192, "patches compared at most, drawn at random")
    max_spatial_samples: Count | None = flag(None, "positions whose similarities are compared, drawn at random; all")
    style_weights: list[NotNegative] | None = flag(None, "a weight of the style loss for each target style; 1 each")
    use_velocity_reg: bool = flag(False, "add the mean square of the velocity that integration starts with")
    vel_reg_weight: NotNegative = flag(0.01, "weight of that")


@dataclass
class TrainingOptions:
    batch_size: Count = flag(32, "latents per forward pass and process")
    accumulation_steps: Count = flag(2, "forward passes per update")
    gradient_cache: bool = flag(False, "the exact gradient of all forward passes as one batch, for one pass more")
    learning_rate: NotNegative = flag(1e-4, "of AdamW, at the start; then a cosine over the epochs")
    min_learning_rate: NotNegative = flag(1e-6, "at the end")
    weight_decay: NotNegative = flag(1e-5, "of AdamW, on all weights")
    max_grad_norm: Positive = flag(1.0, "clip gradients to this norm")
    num_epochs: Count = flag(100, "passes over the data; each leaves out samples that do not fill a batch")
    label_drop_prob: Share = flag(0.1, "share of the updates that train without a target style")
    use_avg_style_for_uncond: bool = flag(True, "without a target style: a learned embedding; otherwise zeros")
    target_styles: Literal["one_per_batch", "others", "permuted"] = flag(
        "one_per_batch",
        "one: the same for the whole batch; others: that, with contents of other styles alone; "
        "permuted: the batch's own, shuffled",
    )
    epsilon: Share = flag(0.01, "earliest time that integration starts at")
    epsilon_warmup_epochs: CountOrZero = flag(10, "epochs in which the earliest time rises from 0 to epsilon")
    latest_time: UpToOne = flag(1.0, "latest time that integration starts at; near 1 little time is left to move in")
    ode_integration_steps: Count = flag(10, "Euler steps, with gradients through all of them")
    legacy_dt: bool = flag(False, "divide the time that is left anew in each step, which never arrives at 1")
    use_amp: bool = flag(False, "mixed precision")
    amp_dtype: Literal["bfloat16", "float16"] = flag("bfloat16", "of mixed precision")
    use_compile: bool = flag(False, "compile the network")
    compile_mode: str = flag("default", "of torch.compile")
    recompile_limit: Count = flag(8, "variants of the network that are compiled at most")
    cudnn_benchmark: bool = flag(False, "let cuDNN try which convolutions are fastest; may take more memory")
    use_gradient_checkpointing: bool = flag(False, "keep only the state between Euler steps and compute the rest again")
    ema_decay: Share | None = flag(None, "of an average of the weights that evaluation then uses, such as 0.999")
    save_interval: CountOrZero = flag(0, "epochs between checkpoints; 0 saves none, the model at the end excepted")
    eval_interval: Count = flag(5, "epochs between evaluations; there is one at the end in any case")
    log_every: Count = flag(10, "updates between entries of memory.jsonl")
    seed: Seed = flag(0, "seed of weights, noise and the order of the data")
    report_to: str = flag("none", "tracker, such as tensorboard or wandb")


@dataclass
class DataOptions:
    data_root: str | None = flag(None, "folder with a folder of .pt or .safetensors latents for each style")
    style_subdirs: list[str] | None = flag(None, "those folders, in the order of style ids; style0, style1, ...")
    dataset: str | None = flag(None, "name or folder of a dataset that `datasets` can load, used instead")
    split: str = flag("train", "split of the dataset")
    latent_column: str = flag("latent", "column of the dataset with latents")
    style_column: str = flag("style", "column of the dataset with style ids")
    num_generated: EightOrMore = flag(256, "latents of each of two styles, generated where neither is given")
    latent_size: Count = flag(32, "side of generated latents, a multiple of 4")
    held_out: HeldOut = flag(0.125, "share of each style's latents that evaluation uses")
    data_seed: Seed = flag(0, "seed of generated latents and of the held-out part")


@dataclass
class CheckpointOptions:
    save_dir: str = flag("outputs/lgt", "folder for model, checkpoints, results.json, memory.jsonl and panels")
    keep_last: Count = flag(2, "checkpoints to keep")
    resume_from_checkpoint: str | None = flag(None, "checkpoint folder, or 'latest' for the newest in save_dir")


@dataclass
class InferenceOptions:
    num_steps: Count = flag(10, "Euler steps")
    start_time: Share = flag(0.5, "where integration starts: 0 from noise, near 1 from the content")
    cfg_scale: Annotated[float, Range()] = flag(1.0, "classifier-free guidance towards the target style; 1 has none")
    num_panels: Count = flag(6, "held-out latents in panels.png, a row for each")
    vae_path: str | None = flag(None, "folder of a diffusers AutoencoderKL, or of landscapes.prepare, to decode panels")


@dataclass
class ModeOptions(OffloadOptions):
    offload: Literal["off", "auto", "all", "inputs"] = flag("off", "which saved activations go to host memory")


class Options(NamedTuple):
    model: ModelOptions = ModelOptions()
    loss: LossOptions = LossOptions()
    training: TrainingOptions = TrainingOptions()
    data: DataOptions = DataOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    inference: InferenceOptions = InferenceOptions()
    offload: ModeOptions = ModeOptions()

    @property
    def output_dir(self) -> str:
        return self.checkpoint.save_dir

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return {name: asdict(section) for name, section in self._asdict().items()}


def parse(description: str, arguments: Sequence[str] | None = None, compared: Sequence[str] = ()) -> Options:
    """Return the defaults, the file that `--config_path` names over them, and the command line's flags over these."""
    options = read_options(Options, description, arguments, by_section=True)
    loss, num_styles = options.loss, options.model.num_styles
    if loss.patch_size % 2 == 0:
        raise ValueError(f"loss.patch_size={loss.patch_size} must be odd, so that every position has a patch around it")
    training = options.training
    if training.epsilon > training.latest_time:
        raise ValueError(
            f"training.epsilon={training.epsilon} must not be above training.latest_time={training.latest_time}: "
            "integration starts between the two"
        )
    if loss.style_weights is not None and len(loss.style_weights) != num_styles:
        raise ValueError(f"loss.style_weights={loss.style_weights} must have model.num_styles={num_styles} values")
    if options.offload.auto_micro_batch and not options.training.gradient_cache:
        raise ValueError(
            "offload.auto_micro_batch=True divides batches, which have another loss then; add --training.gradient_cache"
        )
    remedy = "the states between checkpointed steps; add --training.use_gradient_checkpointing"
    check_offloading(options.offload, compared, checkpointed=training.use_gradient_checkpointing, remedy=remedy)
    return options
