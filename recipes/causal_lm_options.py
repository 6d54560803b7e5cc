"""The flags of `train_causal_lm.py`."""

from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from transformers import HfArgumentParser
from transformers.trainer_utils import get_last_checkpoint

from hf_memopt.checkpoint import find_checkpoint
from hf_memopt.training.low_bit import BITS

MODES = ("off", "all", "inputs", "auto")

# About 4 million parameters with the default tokenizer.
SMALL_QWEN3 = (
    "hidden_size=256,intermediate_size=768,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,"
    "head_dim=64,max_position_embeddings=1024,tie_word_embeddings=true"
)


def flag(default: Any, text: str) -> Any:
    """A field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass
class ModelOptions:
    _argument_group_name: ClassVar[str] = "model"

    model: str | None = flag(None, "hub id or folder of a causal LM to fine-tune; without it one is made from scratch")
    model_type: str = flag("qwen3", "transformers' model type for a model from scratch")
    config_overrides: str = flag(SMALL_QWEN3, "configuration of a model from scratch, as name=value,name=value")
    dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "of the weights; autocast is accelerate's --mixed_precision"
    )
    tokenizer: str | None = flag(None, "hub id or folder (the model's own; from scratch: trained on the text)")
    vocab_size: int = flag(4096, "of a tokenizer that is trained on the text: byte-level BPE")
    gradient_checkpointing: bool = flag(False, "keep only the inputs of each block and compute the rest again")


@dataclass
class DataOptions:
    _argument_group_name: ClassVar[str] = "data"

    text_file: list[str] = field(
        default_factory=list, metadata={"help": "UTF-8 text files; each is read whole and is one document"}
    )
    dataset: str | None = flag(None, "name or folder of a dataset that `datasets` can load")
    dataset_config: str | None = flag(None, "configuration of the dataset")
    split: str = flag("train", "split of the dataset")
    text_column: str = flag("text", "column of the dataset that holds one document per row")
    block_size: int = flag(128, "tokens per training example; documents are packed into blocks without padding")
    held_out: float = flag(0.02, "share of the blocks, drawn at random, that evaluation uses")


@dataclass
class TrainingOptions:
    _argument_group_name: ClassVar[str] = "training"

    output_dir: str = flag("outputs/causal_lm", "folder for the model, checkpoints, results.json and results.png")
    loop: Literal["accelerate", "trainer"] = flag("accelerate", "the loop in this file, or transformers' Trainer")
    max_steps: int = flag(150, "updates of the weights")
    per_device_batch_size: int = flag(8, "blocks per forward pass and process")
    gradient_accumulation_steps: int = flag(1, "forward passes per update; accelerate launch's own flag is not used")
    learning_rate: float = flag(2e-3, "peak learning rate of AdamW")
    weight_decay: float = flag(0.0, "of AdamW, on all weights")
    optimizer_bits: int = flag(32, "of AdamW's states; 8 and 4 are quantised by torchao, and train a little otherwise")
    lr_scheduler_type: str = flag("cosine", "one of transformers' schedules")
    warmup_steps: int = flag(10, "updates until the learning rate has reached its peak")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm")
    log_every: int = flag(10, "updates between log lines")
    eval_every: int = flag(50, "updates between evaluations; there is one at the end in any case")
    checkpointing_steps: int = flag(0, "updates between checkpoints; 0: only when told to stop (SIGTERM, SIGINT)")
    checkpoints_total_limit: int = flag(2, "how many checkpoints to keep")
    resume_from_checkpoint: str | None = flag(None, "checkpoint folder, or 'latest' for the newest in --output_dir")
    seed: int = flag(0, "of weights, dropout, the order of the data and the held-out part")
    report_to: str = flag("none", "tracker, such as tensorboard or wandb")


@dataclass
class OffloadOptions:
    _argument_group_name: ClassVar[str] = "activation offloading"

    offload: Literal["off", "auto", "all", "inputs"] = flag("auto", "which saved activations go to host memory")
    budget_gib: float | None = flag(None, "auto: device memory that saved activations may hold at any time, in GiB")
    max_slowdown: float = flag(0.03, "auto without a budget: share of the step's time that offloading may cost")
    offload_threshold_mb: float = flag(10.0, "storages smaller than this many MiB stay on the device")
    prefetch_ahead: int = flag(2, "how many storages backward brings back ahead of their use")
    pin_memory: bool = flag(True, "use page-locked host memory")
    host_budget_gib: float | None = flag(None, "host memory to use at most, in GiB")
    plan: str | None = flag(
        None, "choose micro-batch and memory flags by simulation, for this device ('auto') or a card such as 8GiB"
    )
    cpu_copies: bool = flag(False, "on a CPU: perform the copies, to try it out. It saves no memory there")
    compare: str | None = flag(None, "modes to compare before training, such as off,all,auto: same weights and batches")
    compare_steps: int = flag(12, "updates per compared mode, the second half of which is measured")

    @property
    def compared_modes(self) -> list[str]:
        return self.compare.split(",") if self.compare else []

    @property
    def used_modes(self) -> set[str]:
        return {self.offload, *self.compared_modes}


class Options(NamedTuple):
    """Everything that the command line says."""

    model: ModelOptions
    data: DataOptions
    training: TrainingOptions
    offload: OffloadOptions

    @property
    def settings(self) -> dict[str, Any]:
        return as_settings(self)


def as_settings(groups: Iterable[Any]) -> dict[str, Any]:
    """All flags in one dictionary, as trackers take them: numbers and strings."""
    flags = {name: value for group in groups for name, value in asdict(group).items()}
    return {name: value if isinstance(value, int | float) else str(value) for name, value in flags.items()}


class _Formatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Defaults beside the flags, and the description as it was written."""


def parse(description: str, arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; `@FILE` stands for the flags in a file, one per line.

    Raises:
        ValueError: names a flag, its value and the remedy.
    """
    options = Options(*read_flags(Options.__annotations__.values(), description, arguments))
    _check_numbers(options)
    _check_offloading(options)
    if options.training.loop == "accelerate":
        check_folder(options.training)
    else:  # Trainer has checkpoints of its own
        check_unused(options.training)
        resumed_folder(options.training)
    return options


def read_flags(groups: Iterable[type], description: str, arguments: Sequence[str] | None) -> tuple[Any, ...]:
    """One instance of each dataclass in `groups`; `@FILE` stands for the flags in a file, one per line."""
    parser = HfArgumentParser(
        groups,
        description=description,
        formatter_class=_Formatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    return parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)


def checkpoints_folder(training: Any) -> Path:
    """Where the checkpoints of this project's loops are."""
    return Path(training.output_dir) / "checkpoints"


def _check_numbers(options: Options) -> None:
    model, data, training, offload = options
    at_least_one = {
        "vocab_size": model.vocab_size,
        "max_steps": training.max_steps,
        "per_device_batch_size": training.per_device_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "log_every": training.log_every,
        "eval_every": training.eval_every,
        "checkpoints_total_limit": training.checkpoints_total_limit,
    }
    for name, value in at_least_one.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if training.checkpointing_steps < 0:
        raise ValueError(f"checkpointing_steps={training.checkpointing_steps} must be at least 0")
    if training.optimizer_bits not in BITS:
        raise ValueError(f"optimizer_bits={training.optimizer_bits} must be one of {', '.join(map(str, BITS))}")
    if data.block_size < 2:
        raise ValueError(f"block_size={data.block_size} must be at least 2: each token is predicted from those before")
    if not 0 < data.held_out < 1:
        raise ValueError(f"held_out={data.held_out} must lie between 0 and 1, for example 0.02")
    if offload.compare_steps < 4:
        raise ValueError(f"compare_steps={offload.compare_steps} must be at least 4: the first half only warms up")


def check_modes(offload: OffloadOptions) -> None:
    """Refuse modes that are none, and a budget that no mode reads."""
    unknown = offload.used_modes - set(MODES)
    if unknown:
        raise ValueError(f"compare={offload.compare!r}: no mode {sorted(unknown)[0]!r}; choose from {', '.join(MODES)}")
    if offload.budget_gib is not None and "auto" not in offload.used_modes:
        raise ValueError(f"budget_gib={offload.budget_gib} needs --offload auto, and offload={offload.offload!r}")
    if offload.plan is not None and offload.compare is not None:
        raise ValueError(f"plan={offload.plan!r} chooses the mode; leave --compare={offload.compare} out")


def _check_offloading(options: Options) -> None:
    check_modes(options.offload)
    if "inputs" in options.offload.used_modes and not options.model.gradient_checkpointing:
        raise ValueError("offload='inputs' moves the inputs of checkpointed blocks; add --gradient_checkpointing")


def check_folder(training: Any) -> None:
    """Refuse an output folder that holds another run, and a checkpoint that is not there."""
    check_unused(training)
    if training.resume_from_checkpoint is not None:
        try:
            find_checkpoint(checkpoints_folder(training), training.resume_from_checkpoint)
        except ValueError as error:
            raise ValueError(f"resume_from_checkpoint={training.resume_from_checkpoint!r}: {error}") from error


def check_unused(training: Any) -> None:
    """Refuse an output folder that holds a run that is not to be resumed."""
    output = Path(training.output_dir)
    patterns = ("results.json", "checkpoints/latest", "checkpoint-*")
    used = [path.relative_to(output) for pattern in patterns for path in output.glob(pattern)]
    if used and training.resume_from_checkpoint is None:
        raise ValueError(
            f"output_dir={training.output_dir!r} already holds {used[0]}; go on with --resume_from_checkpoint latest, "
            "or name another folder"
        )


def resumed_folder(training: TrainingOptions) -> str | None:
    """The checkpoint of Trainer's to resume from; None for a new run.

    Raises:
        ValueError: there is no such folder.
    """
    name = training.resume_from_checkpoint
    if name is None:
        return None
    output = Path(training.output_dir)
    folder = get_last_checkpoint(output) if name == "latest" and output.is_dir() else name
    if folder is None or not Path(folder).is_dir():
        raise ValueError(
            f"resume_from_checkpoint={name!r}: no such folder; name a checkpoint-<updates> folder, or pass 'latest' "
            f"where output_dir={training.output_dir!r} holds one"
        )
    return folder
