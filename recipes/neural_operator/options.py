"""The flags of `train_neural_operator.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hf_memopt.recipes.common.flags import (
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Seed,
    TwoOrMore,
    flag,
    read_options,
)
from hf_memopt.recipes.common.options import OffloadOptions, RunOptions, check_folder, check_offloading


@dataclass
class ModelOptions:
    model: Literal["fno", "tfno", "uno"] = flag("fno", "neuralop's FNO, TFNO (Tucker-factorized weights) or UNO")
    modes: TwoOrMore = flag(16, "Fourier modes along each side; half as many where a UNO's resolution is halved")
    hidden_channels: Count = flag(32, "width")
    num_layers: Count = flag(4, "Fourier layers; at least 4 for a UNO")
    rank: Positive = flag(0.1, "tfno: share of the dense weights' parameters that the factors have, about")
    checkpoint_blocks: bool = flag(False, "keep only the input of each Fourier layer and compute the rest again")
    checkpoint_mlps: bool = flag(False, "the same for the lifting and projection layers")

    @property
    def checkpointed_modules(self) -> list[str]:
        """Return classes and names: an FNO has one `FNOBlocks` for all layers, a UNO one for each."""
        blocks = ["FNOBlocks"] if self.checkpoint_blocks else []
        return blocks + (["lifting", "projection"] if self.checkpoint_mlps else [])


@dataclass
class DataOptions:
    resolution: Count = flag(16, "nodes along each side of the training data; of own files, the number in their name")
    test_resolutions: list[Count] = flag([16, 32, 64], "nodes along each side of the test data; likewise")
    num_train: TwoOrMore = flag(1000, "training samples")
    num_test: Count = flag(100, "test samples of each resolution")
    solve_resolution: CountOrZero = flag(120, "solve on at least so many nodes along each side and keep every n-th")
    data_seed: Seed = flag(0, "of the generated coefficient fields")
    data_folder: str | None = flag(
        None, "folder of darcy_{train,test}_<resolution>.pt, .h5, .npz or _<key>.npy, instead of generated data"
    )
    input_key: str = flag("x", "name of the inputs in own files: (samples, *grid) or (samples, channels, *grid)")
    output_key: str = flag("y", "name of the outputs in own files, on the same grid")
    num_dims: Literal[1, 2, 3] | None = flag(None, "dimensions of the grid in own files, if their shapes do not tell")
    cache_folder: str = flag("outputs/darcy", "where generated data are kept for the next run")


@dataclass
class TrainingOptions(RunOptions):
    output_dir: str = flag("outputs/neural_operator", "folder for the model, checkpoints, results.json and panels.png")
    loop: Literal["accelerate", "neuralop"] = flag("accelerate", "the loop of the recipe, or neuralop's own Trainer")
    epochs: Count = flag(20, "passes over the training samples")
    batch_size: Count = flag(32, "samples per update and process")
    micro_batch_size: CountOrZero = flag(0, "samples per forward pass, of which an update has several; 0: all at once")
    train_loss: Literal["h1", "l2"] = flag("h1", "relative Sobolev or L2 norm of the error, as neuralop defines them")
    learning_rate: NotNegative = flag(5e-3, "peak learning rate of neuralop's AdamW")
    weight_decay: NotNegative = flag(1e-4, "of AdamW, on all weights")
    eval_every: Count = flag(5, "epochs between evaluations; there is one at the end in any case")


class Options(NamedTuple):
    model: ModelOptions
    data: DataOptions
    training: TrainingOptions
    offload: OffloadOptions

    @property
    def output_dir(self) -> str:
        return self.training.output_dir


def parse(description: str, arguments: Sequence[str] | None = None, compared: Sequence[str] = ()) -> Options:
    """Read the command line; `compared` are modes of offloading, none for training, which needs a folder of its own."""
    options = read_options(Options, description, arguments)
    _check_model(options.model, options.data)
    remedy = "the inputs of checkpointed layers; add --checkpoint_blocks or --checkpoint_mlps"
    check_offloading(options.offload, compared, checkpointed=bool(options.model.checkpointed_modules), remedy=remedy)
    _check_loop(options)
    if not compared:
        check_folder(options.training.output_dir, options.training.resume_from_checkpoint)
    return options


def _check_model(model: ModelOptions, data: DataOptions) -> None:
    if model.model == "uno" and model.num_layers < 4:
        raise ValueError(f"num_layers={model.num_layers} must be at least 4 for model='uno'")
    if data.data_folder is not None:
        return  # the grids are in the files
    for resolution in (data.resolution, *data.test_resolutions):
        if resolution < model.modes:
            raise ValueError(
                f"modes={model.modes}: a grid of {resolution} nodes has no such frequencies; use modes={resolution} at "
                "most, or higher resolutions"
            )


def _check_loop(options: Options) -> None:
    """Refuse micro-batches, plans and checkpoints for safe loading, which neuralop's Trainer lacks."""
    if options.training.loop == "accelerate":
        return
    values = vars(options.training) | vars(options.offload)
    for name in ("micro_batch_size", "checkpointing_steps", "resume_from_checkpoint", "plan", "auto_micro_batch"):
        if values[name]:
            raise ValueError(f"{name}={values[name]!r} is not for loop='neuralop'; use --loop accelerate")
