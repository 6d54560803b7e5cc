"""The configuration of `train_lgt.py`, in sections."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from hf_memopt.recipes.causal_lm_options import OffloadOptions, check_modes, flag


@dataclass
class ModelConfig:
    latent_channels: int = flag(4, "channels of the latents")
    base_channels: int = flag(128, "width at full resolution; twice and four times as wide below")
    style_dim: int = flag(256, "width of style embeddings")
    time_dim: int = flag(256, "width of time embeddings")
    num_styles: int = flag(2, "styles that there are embeddings for")
    num_encoder_blocks: int = flag(2, "residual blocks per resolution on the way down")
    num_decoder_blocks: int = flag(3, "style-dependent blocks per resolution on the way up")
    style_noise: float = flag(0.05, "standard deviation of the noise on style embeddings in training")


@dataclass
class LossConfig:
    w_style: float = flag(40.0, "weight of the sliced Wasserstein distance to the target style's patches")
    w_content: float = flag(0.8, "weight of the difference in self-similarity to the content")
    patch_size: int = flag(3, "side of a patch, odd")
    num_projections: int = flag(64, "random directions of the sliced Wasserstein distance")
    max_samples: int = flag(8192, "patches compared at most, drawn at random")
    max_spatial_samples: int | None = flag(None, "positions whose similarities are compared, drawn at random; all")
    style_weights: list[float] | None = field(
        default=None, metadata={"help": "a weight of the style loss for each target style; 1 each"}
    )
    use_velocity_reg: bool = flag(False, "add the mean square of the velocity that integration starts with")
    vel_reg_weight: float = flag(0.01, "weight of that")


@dataclass
class TrainingConfig:
    batch_size: int = flag(32, "latents per forward pass and process")
    accumulation_steps: int = flag(2, "forward passes per update")
    gradient_cache: bool = flag(False, "the exact gradient of all forward passes as one batch, for one pass more")
    learning_rate: float = flag(1e-4, "of AdamW, at the start; then a cosine over the epochs")
    min_learning_rate: float = flag(1e-6, "at the end")
    weight_decay: float = flag(1e-5, "of AdamW, on all weights")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm")
    num_epochs: int = flag(100, "passes over the data; what does not fill a batch is left out of each")
    label_drop_prob: float = flag(0.1, "share of the updates that train without a target style")
    use_avg_style_for_uncond: bool = flag(True, "without a target style: a learned embedding; otherwise zeros")
    target_styles: Literal["one_per_batch", "permuted"] = flag(
        "one_per_batch", "of a batch: all the same, or the batch's own in another order"
    )
    epsilon: float = flag(0.01, "earliest time that integration starts at")
    epsilon_warmup_epochs: int = flag(10, "epochs in which the earliest time rises from 0 to epsilon")
    ode_integration_steps: int = flag(10, "Euler steps, with gradients through all of them")
    legacy_dt: bool = flag(False, "divide the time that is left anew in each step, which never arrives at 1")
    use_amp: bool = flag(False, "mixed precision")
    amp_dtype: Literal["bfloat16", "float16"] = flag("bfloat16", "of mixed precision")
    use_compile: bool = flag(False, "compile the network")
    compile_mode: str = flag("default", "of torch.compile")
    recompile_limit: int = flag(8, "variants of the network that are compiled at most")
    cudnn_benchmark: bool = flag(False, "let cuDNN try which convolutions are fastest; may take more memory")
    use_gradient_checkpointing: bool = flag(False, "keep only the state between Euler steps and compute the rest again")
    ema_decay: float | None = flag(None, "of an average of the weights that evaluation then uses, such as 0.999")
    save_interval: int = flag(0, "epochs between checkpoints; 0 saves none, the model at the end excepted")
    eval_interval: int = flag(5, "epochs between evaluations; there is one at the end in any case")
    log_every: int = flag(10, "updates between entries of memory.jsonl")
    seed: int = flag(0, "of weights, noise and the order of the data")
    report_to: str = flag("none", "tracker, such as tensorboard or wandb")


@dataclass
class DataConfig:
    data_root: str | None = flag(None, "folder with a folder of .pt or .safetensors latents for each style")
    style_subdirs: list[str] | None = field(
        default=None, metadata={"help": "those folders, in the order of style ids; style0, style1, ..."}
    )
    dataset: str | None = flag(None, "name or folder of a dataset that `datasets` can load, used instead")
    split: str = flag("train", "split of the dataset")
    latent_column: str = flag("latent", "column of the dataset with latents")
    style_column: str = flag("style", "column of the dataset with style ids")
    num_generated: int = flag(256, "latents of each style that are generated where neither is given; two styles")
    latent_size: int = flag(32, "side of generated latents, a multiple of 4")
    held_out: float = flag(0.125, "share of each style's latents that evaluation uses")
    data_seed: int = flag(0, "of generated latents and of the held-out part")


@dataclass
class CheckpointConfig:
    save_dir: str = flag("outputs/lgt", "folder for model, checkpoints, results.json, memory.jsonl and panels")
    keep_last: int = flag(2, "checkpoints to keep")
    resume_from_checkpoint: str | None = flag(None, "checkpoint folder, or 'latest' for the newest in save_dir")


@dataclass
class InferenceConfig:
    num_steps: int = flag(10, "Euler steps")
    start_time: float = flag(0.5, "where integration starts: 0 from noise, near 1 from the content")
    cfg_scale: float = flag(1.0, "classifier-free guidance towards the target style; 1 has none")
    num_panels: int = flag(6, "held-out latents in panels.png")
    vae_path: str | None = flag(None, "folder of a diffusers AutoencoderKL that decodes panels to images")


@dataclass
class OffloadConfig(OffloadOptions):
    offload: Literal["off", "auto", "all", "inputs"] = flag("off", "which saved activations go to host memory")


class Config(NamedTuple):
    """All sections."""

    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    inference: InferenceConfig = InferenceConfig()
    offload: OffloadConfig = OffloadConfig()

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """What a JSON file of this configuration holds."""
        return {name: asdict(section) for name, section in self._asdict().items()}

    def check(self) -> None:
        """Raises ValueError, naming field, value and remedy, for what cannot be trained."""
        _check_ranges(self)
        _check_offloading(self)


def _check_ranges(config: Config) -> None:
    model, loss, training, data, _, inference, offload = config
    at_least = {
        "model.base_channels": (model.base_channels, 4),
        "model.time_dim": (model.time_dim, 2),
        "model.num_styles": (model.num_styles, 2),
        "loss.max_samples": (loss.max_samples, 1),
        "loss.num_projections": (loss.num_projections, 1),
        "training.batch_size": (training.batch_size, 1),
        "training.accumulation_steps": (training.accumulation_steps, 1),
        "training.num_epochs": (training.num_epochs, 1),
        "training.ode_integration_steps": (training.ode_integration_steps, 1),
        "training.eval_interval": (training.eval_interval, 1),
        "training.save_interval": (training.save_interval, 0),
        "data.num_generated": (data.num_generated, 8),
        "inference.num_steps": (inference.num_steps, 1),
        "offload.compare_steps": (offload.compare_steps, 4),
    }
    for name, (value, least) in at_least.items():
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if loss.patch_size % 2 == 0:
        raise ValueError(f"loss.patch_size={loss.patch_size} must be odd, so that every position has a patch around it")
    if loss.style_weights is not None and len(loss.style_weights) != model.num_styles:
        raise ValueError(
            f"loss.style_weights={loss.style_weights} must have model.num_styles={model.num_styles} values"
        )
    for name, share in (
        ("training.epsilon", training.epsilon),
        ("training.label_drop_prob", training.label_drop_prob),
        ("inference.start_time", inference.start_time),
    ):
        if not 0 <= share < 1:
            raise ValueError(f"{name}={share} must be at least 0 and less than 1")
    if not 0 < data.held_out < 1:
        raise ValueError(f"data.held_out={data.held_out} must lie between 0 and 1, for example 0.125")


def _check_offloading(config: Config) -> None:
    check_modes(config.offload)
    if "inputs" in config.offload.used_modes and not config.training.use_gradient_checkpointing:
        raise ValueError(
            "offload.offload='inputs' moves the states between checkpointed steps; "
            "add --training.use_gradient_checkpointing"
        )
