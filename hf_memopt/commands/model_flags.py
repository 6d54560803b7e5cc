"""The flags that say how a transformers model is trained, for all commands that simulate one."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.command_line import number, or_none
from hf_memopt.ranges import COUNT, POSITIVE

if TYPE_CHECKING:
    from hf_memopt.jobs.huggingface import HuggingFaceModel

# Options of `HuggingFaceModel` that take one of a few values; the first is the default. They are written down again
# here, since `jobs.huggingface` is slow to import and not needed for `--help`.
MODEL_CHOICES = {
    "task": (
        (
            "auto",
            "seq2seq",
            "speech-seq2seq",
            "masked",
            "image-text-to-text",
            "causal",
            "image-classification",
            "sequence-classification",
            "token-classification",
            "ctc",
            "denoising",
        ),
        "what the model learns; auto: by the class that the configuration names",
    ),
    "dtype": (("float32", "bfloat16", "float16"), "of the weights"),
    "quantize": (
        ("none", "nf4", "int8", "int8-torchao"),
        "frozen weights in 4 or 8 bits by bitsandbytes, or in 8 by torchao; with --lora-rank",
    ),
    "precision": (("no", "bf16", "fp16"), "accelerate's autocast; a recipe has its own, or tries both with auto"),
    "attention": (("auto", "sdpa", "eager"), "auto: transformers' choice"),
    "loss": (("full", "chunked"), "full: from all logits at once; chunked: tile by tile, as in TRL"),
    "optimizer": (
        (
            "adamw",
            "adamw-foreach",
            "sgd",
            "adamw-8bit",
            "adamw-4bit",
            "adamw-8bit-bnb",
            "paged-adamw-8bit",
            "paged-adamw-32bit",
            "adafactor",
        ),
        "torch's fused AdamW, torch's default one, SGD without momentum, torchao's AdamW in few bits, bitsandbytes', "
        "or Adafactor",
    ),
    "engine": (
        ("ddp", "fsdp2", "fsdp2-no-reshard", "zero2", "zero3"),
        "how several GPUs share the run; zero2 and zero3 need DeepSpeed",
    ),
}
# The other options of `HuggingFaceModel`, and all their defaults on the command line.
_MODEL_DEFAULTS: dict[str, Any] = dict.fromkeys(MODEL_CHOICES) | {
    "seq_len": 2048,
    "lora_rank": None,
    "lora_targets": None,
    "images_per_sample": 1,
    "image_size": None,
    "freeze_vision_tower": False,
    "padding": False,
    "use_dora": False,
    "optimizer_in_backward": False,
    "max_grad_norm": 1.0,
    "num_gpus": 1,
}
ACTIVATION_CHOICES = {
    "checkpointing": (("none", "selective", "full"), "of activations"),
    "offload": (("off", "auto", "inputs", "all"), "of activations"),
}


def add_to(
    parser: argparse.ArgumentParser,
    recipes_precisions: tuple[str, ...] = (),
    checkpointing_and_offload: bool = False,
) -> None:
    """Add flags for training a transformers model: the arguments of `HuggingFaceModel`.

    Args:
        parser: parser of the command.
        recipes_precisions: values of `--precision` that recipes have besides.
        checkpointing_and_offload: add them too; a plan searches them.
    """
    group = parser.add_argument_group("with a model")
    group.add_argument(
        "--training-args",
        type=Path,
        metavar="FILE",
        help="YAML or JSON with fields of TrainingArguments, or of TRL's SFTConfig and ModelConfig: train as the file "
        "says; other flags override it",
    )
    precisions, text = MODEL_CHOICES["precision"]
    _add_choices(group, MODEL_CHOICES | {"precision": ((*precisions, *recipes_precisions), text)})
    group.add_argument(
        "--seq-len",
        type=number(COUNT),
        help="tokens per sample, image tokens included, or frames of sound (default: %(default)s)",
    )
    group.add_argument(
        "--images-per-sample",
        type=number(COUNT),
        help="images beside the text of a vision-language model (default: %(default)s)",
    )
    group.add_argument(
        "--image-size",
        metavar="H[xW]",
        help="size of these images after the model's processor, or of those that a denoiser learns (default: the "
        "configuration's, if it has one)",
    )
    group.add_argument(
        "--freeze-vision-tower", action="store_true", help="do not train the vision tower, and give it no adapters"
    )
    group.add_argument(
        "--padding", action="store_true", help="give batches an attention mask, as if some samples were shorter"
    )
    group.add_argument(
        "--lora-rank", type=number(COUNT), help="train adapters of this rank and freeze the rest (default: none)"
    )
    group.add_argument(
        "--lora-targets",
        help="layers that get adapters, such as q_proj,v_proj (default: all-linear; for a denoiser, the layers that "
        "diffusers' scripts adapt)",
    )
    group.add_argument("--use-dora", action="store_true", help="adapters with a magnitude for each output (DoRA)")
    group.add_argument(
        "--optimizer-in-backward",
        action="store_true",
        help="update each weight as soon as its gradient is there; with --max-grad-norm none, without --accumulation",
    )
    group.add_argument(
        "--max-grad-norm",
        type=or_none(number(POSITIVE)),
        help="clip gradients to this norm; none: do not clip (default: %(default)s)",
    )
    group.add_argument(
        "--num-gpus",
        type=number(COUNT),
        help="GPUs, with one process each; all figures are for one GPU (default: %(default)s)",
    )
    parser.set_defaults(**_MODEL_DEFAULTS)
    if checkpointing_and_offload:
        _add_choices(group, ACTIVATION_CHOICES)


def model_of(parsed: argparse.Namespace, effective_batch: int) -> "HuggingFaceModel":
    """Return the model that a command line describes."""
    from hf_memopt.jobs.huggingface import HuggingFaceModel

    options: dict[str, Any] = {name: getattr(parsed, name) or values[0] for name, (values, _) in MODEL_CHOICES.items()}
    options |= {name: getattr(parsed, name) for name in _MODEL_DEFAULTS.keys() - MODEL_CHOICES.keys()}
    return HuggingFaceModel(parsed.model, effective_batch=effective_batch, **options)


def given(parsed: argparse.Namespace) -> list[str]:
    """Return the flags that say the same of the model to another command."""
    changed = [name for name, default in _MODEL_DEFAULTS.items() if getattr(parsed, name) != default]
    return [word for name in changed for word in words_of(parsed, name)]


def words_of(parsed: argparse.Namespace, name: str) -> list[str]:
    """Return an option's flag with its value, as it is written on a command line."""
    flag, value = f"--{name.replace('_', '-')}", getattr(parsed, name)
    return [flag] if value is True else [flag, "none" if value is None else str(value)]


def _add_choices(group: Any, choices: dict[str, tuple[tuple[str, ...], str]]) -> None:
    for name, (values, text) in choices.items():
        group.add_argument(f"--{name}", choices=values, help=f"{text} (default: {values[0]})")
