"""The flags of `train_causal_lm.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from transformers.trainer_utils import get_last_checkpoint

from hf_memopt.checkpoint import find_checkpoint
from hf_memopt.command_line import check_output_folder
from hf_memopt.ranges import Range
from hf_memopt.recipes.common.flags import (
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Schedule,
    Seed,
    as_settings,
    check_card,
    flag,
    read_flags,
)
from hf_memopt.training.low_bit import BITS

MODES = ("off", "all", "inputs", "auto")

# About 4 million parameters with the default tokenizer.
SMALL_QWEN3 = (
    "hidden_size=256,intermediate_size=768,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,"
    "head_dim=64,max_position_embeddings=1024,tie_word_embeddings=true"
)


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
    vocab_size: Count = flag(4096, "of a tokenizer that is trained on the text: byte-level BPE")
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
    block_size: Annotated[int, Range(at_least=2, whole=True, why=": each token is predicted from those before")] = flag(
        128, "tokens per training example; documents are packed into blocks without padding"
    )
    held_out: Annotated[float, Range(above=0, below=1, why=", for example 0.02")] = flag(
        0.02, "share of the blocks, drawn at random, that evaluation uses"
    )


@dataclass
class TrainingOptions:
    _argument_group_name: ClassVar[str] = "training"

    output_dir: str = flag("outputs/causal_lm", "folder for the model, checkpoints, results.json and results.png")
    loop: Literal["accelerate", "trainer"] = flag("accelerate", "the loop in this file, or transformers' Trainer")
    max_steps: Count = flag(150, "updates of the weights")
    per_device_batch_size: Count = flag(8, "blocks per forward pass and process")
    gradient_accumulation_steps: Count = flag(1, "forward passes per update; accelerate launch's own flag is not used")
    learning_rate: NotNegative = flag(2e-3, "peak learning rate of AdamW")
    weight_decay: NotNegative = flag(0.0, "of AdamW, on all weights")
    optimizer_bits: Count = flag(
        32, "of AdamW's states; 8 and 4 are quantised by torchao, and train a little otherwise"
    )
    lr_scheduler_type: Schedule = flag("cosine", "one of transformers' schedules")
    warmup_steps: CountOrZero = flag(10, "updates until the learning rate has reached its peak")
    max_grad_norm: Positive = flag(1.0, "gradients are clipped to this norm")
    log_every: Count = flag(10, "updates between log lines")
    eval_every: Count = flag(50, "updates between evaluations; there is one at the end in any case")
    checkpointing_steps: CountOrZero = flag(
        0, "updates between checkpoints; 0: only when told to stop (SIGTERM, SIGINT)"
    )
    checkpoints_total_limit: Count = flag(2, "how many checkpoints to keep")
    resume_from_checkpoint: str | None = flag(None, "checkpoint folder, or 'latest' for the newest in --output_dir")
    seed: Seed = flag(0, "of weights, dropout, the order of the data and the held-out part")
    report_to: str = flag("none", "tracker, such as tensorboard or wandb")


@dataclass
class OffloadOptions:
    _argument_group_name: ClassVar[str] = "activation offloading"

    offload: Literal["off", "auto", "all", "inputs"] = flag("auto", "which saved activations go to host memory")
    budget_gib: NotNegative | None = flag(
        None, "auto: device memory that saved activations may hold at any time, in GiB"
    )
    max_slowdown: NotNegative = flag(0.03, "auto without a budget: share of the step's time that offloading may cost")
    offload_threshold_mb: NotNegative = flag(10.0, "storages smaller than this many MiB stay on the device")
    prefetch_ahead: CountOrZero = flag(2, "how many storages backward brings back ahead of their use")
    pin_memory: bool = flag(True, "use page-locked host memory")
    host_budget_gib: NotNegative | None = flag(None, "host memory to use at most, in GiB")
    plan: str | None = flag(
        None, "choose micro-batch and memory flags by simulation, for this device ('auto') or a card such as 8GiB"
    )
    cpu_copies: bool = flag(False, "on a CPU: perform the copies, to try it out. It saves no memory there")
    compare: str | None = flag(None, "modes to compare before training, such as off,all,auto: same weights and batches")
    compare_steps: Annotated[int, Range(at_least=4, whole=True, why=": the first half only warms up")] = flag(
        12, "updates per compared mode, the second half of which is measured"
    )

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


def parse(description: str, arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; `@FILE` stands for the flags in a file, one per line.

    Raises:
        ValueError: names a flag, its value and the remedy.
    """
    options = Options(*read_flags(Options.__annotations__.values(), description, arguments))
    if options.training.optimizer_bits not in BITS:
        raise ValueError(f"optimizer_bits={options.training.optimizer_bits} must be one of {', '.join(map(str, BITS))}")
    _check_offloading(options)
    if options.training.loop == "accelerate":
        check_folder(options.training)
    else:  # Trainer has checkpoints of its own
        check_unused(options.training)
        resumed_folder(options.training)
    return options


def checkpoints_folder(training: Any) -> Path:
    """Where the checkpoints of this project's loops are."""
    return Path(training.output_dir) / "checkpoints"


def check_modes(offload: OffloadOptions) -> None:
    """Refuse modes that are none, and a budget that no mode reads."""
    unknown = offload.used_modes - set(MODES)
    if unknown:
        raise ValueError(f"compare={offload.compare!r}: no mode {sorted(unknown)[0]!r}; choose from {', '.join(MODES)}")
    if offload.budget_gib is not None and "auto" not in offload.used_modes:
        raise ValueError(f"budget_gib={offload.budget_gib} needs --offload auto, and offload={offload.offload!r}")
    if offload.plan is not None and offload.compare is not None:
        raise ValueError(f"plan={offload.plan!r} chooses the mode; leave --compare={offload.compare} out")
    check_card(offload.plan)


def _check_offloading(options: Options) -> None:
    check_modes(options.offload)
    if "inputs" in options.offload.used_modes and not options.model.gradient_checkpointing:
        raise ValueError("offload='inputs' moves the inputs of checkpointed blocks; add --gradient_checkpointing")


def check_folder(training: Any) -> None:
    """Refuse an output folder that holds another run, and a checkpoint that is not there."""
    check_unused(training)
    check_resumable(checkpoints_folder(training), training.resume_from_checkpoint)


def check_resumable(checkpoints: Path, resume_from_checkpoint: str | None) -> None:
    """Refuse a checkpoint that is not there; None stands for none."""
    if resume_from_checkpoint is not None:
        try:
            find_checkpoint(checkpoints, resume_from_checkpoint)
        except ValueError as error:
            raise ValueError(f"resume_from_checkpoint={resume_from_checkpoint!r}: {error}") from error


def check_unused(training: Any) -> None:
    """Refuse an output folder that holds a run that is not to be resumed, or cannot be written to."""
    output = Path(training.output_dir)
    check_output_folder("output_dir", output)
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
