"""The flags of `train_neural_operator.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from hf_memopt.ranges import Range
from hf_memopt.recipes.common.flags import (
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Schedule,
    Seed,
    as_settings,
    flag,
    read_flags,
)
from hf_memopt.recipes.common.options import OffloadOptions, check_folder, check_modes


@dataclass
class ModelOptions:
    _argument_group_name: ClassVar[str] = "model"

    model: Literal["fno", "tfno", "uno"] = flag("fno", "neuralop's FNO, TFNO (Tucker-factorized weights) or UNO")
    modes: Annotated[int, Range(at_least=2, whole=True)] = flag(
        16, "Fourier modes along each side; a UNO has half as many where its resolution is halved"
    )
    hidden_channels: Count = flag(32, "width")
    num_layers: Count = flag(4, "Fourier layers; at least 4 for a UNO")
    rank: Positive = flag(0.1, "tfno: share of the dense weights' parameters that the factors have, about")
    checkpoint_blocks: bool = flag(False, "keep only the input of each Fourier layer and compute the rest again")
    checkpoint_mlps: bool = flag(False, "the same for the lifting and projection layers")

    @property
    def checkpointed_modules(self) -> list[str]:
        """By class or name: an FNO has one `FNOBlocks` for all layers, a UNO one for each."""
        blocks = ["FNOBlocks"] if self.checkpoint_blocks else []
        return blocks + (["lifting", "projection"] if self.checkpoint_mlps else [])


@dataclass
class DataOptions:
    _argument_group_name: ClassVar[str] = "data"

    resolution: Count = flag(16, "nodes along each side of the training data")
    test_resolutions: list[Count] = field(
        default_factory=lambda: [16, 32, 64], metadata={"help": "nodes along each side of the test data"}
    )
    num_train: Annotated[int, Range(at_least=2, whole=True)] = flag(1000, "training samples")
    num_test: Count = flag(100, "test samples of each resolution")
    solve_resolution: CountOrZero = flag(
        120, "solve on a grid of at least this many nodes along each side and keep every second, third, ... node"
    )
    data_seed: Seed = flag(0, "of the generated coefficient fields")
    data_folder: str | None = flag(
        None, "folder with darcy_train_<resolution>.pt and darcy_test_<resolution>.pt, used instead of generated data"
    )
    cache_folder: str = flag("outputs/darcy", "where generated data are kept for the next run")


@dataclass
class TrainingOptions:
    _argument_group_name: ClassVar[str] = "training"

    output_dir: str = flag("outputs/neural_operator", "folder for the model, checkpoints, results.json and panels.png")
    loop: Literal["accelerate", "neuralop"] = flag("accelerate", "the loop in this file, or neuralop's own Trainer")
    epochs: Count = flag(20, "passes over the training samples")
    batch_size: Count = flag(32, "samples per update and process")
    micro_batch_size: CountOrZero = flag(
        0, "samples per forward pass, of which an update then has several; 0: all at once"
    )
    train_loss: Literal["h1", "l2"] = flag("h1", "relative Sobolev or L2 norm of the error, as neuralop defines them")
    learning_rate: NotNegative = flag(5e-3, "peak learning rate of neuralop's AdamW")
    weight_decay: NotNegative = flag(1e-4, "of AdamW, on all weights")
    lr_scheduler_type: Schedule = flag("cosine", "one of transformers' schedules, stepped at every update")
    warmup_steps: CountOrZero = flag(0, "updates until the learning rate has reached its peak")
    eval_every: Count = flag(5, "epochs between evaluations; there is one at the end in any case")
    checkpointing_steps: CountOrZero = flag(
        0, "updates between checkpoints; 0: only when told to stop (SIGTERM, SIGINT)"
    )
    checkpoints_total_limit: Count = flag(2, "how many checkpoints to keep")
    resume_from_checkpoint: str | None = flag(None, "checkpoint folder, or 'latest' for the newest in --output_dir")
    seed: Seed = flag(0, "of weights and the order of the data")
    report_to: str = flag("none", "tracker, such as tensorboard or wandb")


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
    _check_model(options.model, options.data)
    _check_offloading(options)
    _check_loop(options)
    check_folder(options.training)
    return options


def _check_model(model: ModelOptions, data: DataOptions) -> None:
    if model.model == "uno" and model.num_layers < 4:
        raise ValueError(f"num_layers={model.num_layers} must be at least 4 for model='uno'")
    for resolution in (data.resolution, *data.test_resolutions):
        if resolution < model.modes:
            raise ValueError(
                f"modes={model.modes}: a grid of {resolution} nodes has no such frequencies; use modes={resolution} at "
                "most, or higher resolutions"
            )


def _check_offloading(options: Options) -> None:
    check_modes(options.offload)
    if "inputs" in options.offload.used_modes and not options.model.checkpointed_modules:
        raise ValueError(
            "offload='inputs' moves the inputs of checkpointed layers; add --checkpoint_blocks or --checkpoint_mlps"
        )


def _check_loop(options: Options) -> None:
    """neuralop's Trainer has no micro-batches, and cannot read its own checkpoints under torch's safe loading."""
    training = options.training
    if training.loop == "accelerate":
        return
    for name in ("micro_batch_size", "checkpointing_steps", "resume_from_checkpoint"):
        value = getattr(training, name)
        if value:
            raise ValueError(f"{name}={value!r} is not for loop='neuralop'; use --loop accelerate")
    if options.offload.plan is not None:
        raise ValueError(f"plan={options.offload.plan!r} is not for loop='neuralop'; use --loop accelerate")
