"""The flags of `train_sft.py`: a few of its own, TRL's, and those of `MemoptArguments`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_type_hints

import torch
import transformers
from trl import SFTConfig, TrlParser

from hf_memopt.callbacks import MemoptArguments
from hf_memopt.command_line import argparse_raising, flag
from hf_memopt.ranges import check_ranges
from hf_memopt.recipes.common.flags import Count, Formatter, check_card, refuse_unknown
from hf_memopt.recipes.common.options import check_unused
from hf_memopt.shipped_configs import config_file


@dataclass
class SftOptions:
    """Model and data; the names are those of `hf-memopt plan`."""

    model: str | None = flag(None, "hub id or folder of a causal LM; without it a tiny one is made from scratch")
    dataset: str | None = flag(
        None, "hub id or folder, with rows of `messages`, or of `prompt` and `completion` (default: arithmetic)"
    )
    split: str = flag("train", "of the dataset")
    dtype: Literal["float32", "bfloat16", "float16"] = flag(
        "float32", "of the weights, except adapters; autocast is --bf16"
    )
    attention: Literal["auto", "sdpa", "eager"] = flag("auto", "auto: transformers' choice")
    loss: Literal["chunked", "full"] = flag(
        "chunked", "from the logits of a tile of tokens at a time, as TRL has it, or from those of all tokens"
    )
    lora_rank: Count | None = flag(None, "train adapters of this rank (PEFT) and freeze the rest")
    lora_targets: str = flag("all-linear", "layers that have adapters, such as q_proj,v_proj")
    use_dora: bool = flag(False, "adapters with a magnitude for each output (DoRA)")
    quantize: Literal["none", "nf4", "nf4-double", "int8", "llm-int8"] = flag(
        "none",
        "frozen weights in 4 bits by bitsandbytes, with nested quantisation or without, or in 8 by torchao or by "
        "bitsandbytes (llm-int8); needs --lora_rank",
    )
    plan: str | None = flag(None, "simulate to choose micro-batch and memory flags, for 'auto' or a card such as 8GiB")


@dataclass
class SftTraining(SFTConfig):
    """TRL's flags, some with other defaults. Where there is no accelerator, `use_cpu` is on."""

    output_dir: str = flag("outputs/sft", "folder for the model, checkpoints and logs")
    assistant_only_loss: bool = flag(True, "of rows of `messages`, learn the assistant's words alone")
    bf16: bool | None = flag(None, "autocast to bfloat16 (default: on, if there is an accelerator)")

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu, self.bf16 = True, bool(self.bf16)
        super().__post_init__()
        # Of several GPUs one process would use all, by nn.DataParallel, which TRL's trainer refuses.
        self._n_gpu = min(self.n_gpu, 1)


class Options(NamedTuple):
    sft: SftOptions
    training: SftTraining
    memopt: MemoptArguments


def parse(description: str, arguments: Sequence[str] | None = None) -> Options:
    """Read flags and the YAML file of `--config FILE`, which holds any of them without sections."""
    kinds = list(get_type_hints(Options).values())
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--config" in words[:-1]:
        place = words.index("--config") + 1
        words[place] = str(config_file("config", Path(words[place])))
    parser = TrlParser(kinds, description=description, formatter_class=Formatter, allow_abbrev=False)
    with argparse_raising():
        *sections, unknown = parser.parse_args_and_config(words, return_remaining_strings=True)
    refuse_unknown(unknown, parser)
    sft, _, memopt = options = Options(*sections)
    check_ranges(sft)
    if sft.lora_rank is None and sft.quantize != "none":
        raise ValueError(f"quantize={sft.quantize!r} freezes the base, so that adapters have to learn; add --lora_rank")
    if sft.lora_rank is None and memopt.base != "off" and not memopt.trained:
        raise ValueError(
            f"base={memopt.base!r} streams frozen weights, and all of them learn; add --lora_rank or --trained"
        )
    check_card(sft.plan)
    if sft.plan is not None and memopt.budget_gib is not None:
        raise ValueError(f"plan={sft.plan!r} chooses what is offloaded; leave --budget_gib={memopt.budget_gib} out")
    return options


def check_folder(options: Options) -> str | None:
    """Return the folder to resume from, if any; refuse an output folder that holds another run, as other recipes do."""
    folder, resumed = options.training.output_dir, options.training.resume_from_checkpoint
    check_unused(folder, resumed)
    if resumed is None:
        return None
    newest = resumed == "latest" and Path(folder).is_dir()
    found = transformers.trainer_utils.get_last_checkpoint(folder) if newest else resumed
    if found is None or not Path(found).is_dir():
        raise ValueError(
            f"resume_from_checkpoint={resumed!r}: no such folder; name a checkpoint-<updates> folder, or pass 'latest' "
            f"where output_dir={folder!r} holds one"
        )
    return str(found)
