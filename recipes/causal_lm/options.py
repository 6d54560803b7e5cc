"""The flags of `train_causal_lm.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from hf_memopt.ranges import Range
from hf_memopt.recipes.common.flags import Count, CountOrZero, HeldOut, NotNegative, Positive, flag, read_options
from hf_memopt.recipes.common.options import OffloadOptions, RunOptions, check_folder, check_offloading

BlockSize = Annotated[int, Range(at_least=2, whole=True, why=": each token is predicted from those before")]
# About 4 million parameters with the default tokenizer.
SMALL_QWEN3 = (
    "hidden_size=256,intermediate_size=768,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,"
    "head_dim=64,max_position_embeddings=1024,tie_word_embeddings=true"
)


@dataclass
class ModelOptions:
    model: str | None = flag(None, "hub id or folder of a causal LM to fine-tune; without it one is made from scratch")
    model_type: str = flag("qwen3", "transformers' model type for a model from scratch")
    config_overrides: str = flag(SMALL_QWEN3, "configuration of a model from scratch, as name=value,name=value")
    dtype: Literal["float32", "bfloat16"] = flag("float32", "of the weights; autocast: accelerate's --mixed_precision")
    tokenizer: str | None = flag(None, "hub id or folder (the model's own; from scratch: trained on the text)")
    vocab_size: Count = flag(4096, "of a tokenizer that is trained on the text: byte-level BPE")
    gradient_checkpointing: bool = flag(False, "keep only the inputs of each block and compute the rest again")


@dataclass
class DataOptions:
    text_file: list[str] = flag([], "UTF-8 text files; each is read whole and is one document")
    dataset: str | None = flag(None, "name or folder of a dataset that `datasets` can load")
    dataset_config: str | None = flag(None, "configuration of the dataset")
    split: str = flag("train", "split of the dataset")
    text_column: str = flag("text", "column of the dataset that holds one document per row")
    block_size: BlockSize = flag(128, "tokens per training example; documents are packed into blocks without padding")
    held_out: HeldOut = flag(0.02, "share of the blocks, drawn at random, that evaluation uses")


@dataclass
class TrainingOptions(RunOptions):
    output_dir: str = flag("outputs/causal_lm", "folder for the model, checkpoints, results.json and results.png")
    max_steps: Count = flag(150, "updates of the weights")
    per_device_batch_size: Count = flag(8, "blocks per forward pass and process")
    gradient_accumulation_steps: Count = flag(1, "forward passes per update; accelerate launch's own flag is not used")
    learning_rate: NotNegative = flag(2e-3, "peak learning rate of AdamW")
    weight_decay: NotNegative = flag(0.0, "of AdamW, on all weights")
    optimizer_bits: Literal[32, 8, 4] = flag(32, "of AdamW's states; torchao's 8 and 4 train slightly differently")
    optimizer_home: Literal["off", "host", "file"] = flag(
        "off", "where AdamW's states live between updates: in host memory, or in a file in --disk"
    )
    base: Literal["off", "host", "file"] = flag(
        "off",
        "home of the weights between visits to the device: host memory, or files, in --disk once they are written",
    )
    trained: bool = flag(
        False, "with --base: weights that train have that home, with their gradients and AdamW's states"
    )
    warmup_steps: CountOrZero = flag(10, "updates until the learning rate has reached its peak")
    max_grad_norm: Positive = flag(1.0, "clip gradients to this norm")
    log_every: Count = flag(10, "updates between log lines")
    eval_every: Count = flag(50, "updates between evaluations; there is one at the end in any case")


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
    remedy = "the inputs of checkpointed blocks; add --gradient_checkpointing"
    training = options.training
    if training.trained != (training.base != "off"):
        raise ValueError(
            f"base={training.base}, trained={training.trained}: this recipe trains all weights; give both, or neither"
        )
    check_offloading(options.offload, compared, checkpointed=options.model.gradient_checkpointing, remedy=remedy)
    if not compared:
        check_folder(training.output_dir, training.resume_from_checkpoint)
    return options
