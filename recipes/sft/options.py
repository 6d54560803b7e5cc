"""The flags of `train_sft.py`: those of `SftOptions`, TRL, `MemoptArguments`, and the short flags of a plan."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

import torch
import transformers
from transformers import HfArgumentParser
from trl import ModelConfig, SFTConfig

from hf_memopt.callbacks import MemoptArguments
from hf_memopt.command_line import Parser, argparse_raising, flag
from hf_memopt.planning.job import Job, read_fields
from hf_memopt.planning.job_flags import add_flags
from hf_memopt.planning.workloads.trainer_fields import SHORT, of_job
from hf_memopt.recipes.common.flags import Formatter, check_card, refuse_unknown
from hf_memopt.recipes.common.options import check_unused
from hf_memopt.recipes.common.shipped_configs import config_file

_IN_8_BITS = "int8-torchao"


@dataclass
class SftOptions:
    """Data, and what TRL has no flags for."""

    dataset: str | None = flag(
        None, "hub id or folder, with rows of `messages`, or of `prompt` and `completion` (default: arithmetic)"
    )
    split: str = flag("train", "of the dataset")
    quantize: Literal["int8-torchao"] | None = flag(
        None, "frozen weights in 8 bits by torchao; bitsandbytes' are --load_in_4bit and --load_in_8bit"
    )
    adapters_dtype: Literal["float32", "bfloat16"] | None = flag(
        None, "of adapters (default: as TRL and PEFT make them)"
    )
    freeze_layers: int | None = flag(None, "do not train the input embeddings and this many of the first layers")
    plan: str | None = flag(None, "simulate to choose micro-batch and memory flags, for 'auto' or a card such as 8GiB")


@dataclass
class SftTraining(SFTConfig):
    """TRL's flags, some with other defaults. Where there is no accelerator, `use_cpu` is on."""

    output_dir: str = flag("outputs/sft", "folder for the model, checkpoints and logs")
    assistant_only_loss: bool | None = flag(
        None, "of rows of `messages`, learn the assistant's words alone (default: where TRL can mark them)"
    )
    bf16: bool | None = flag(None, "autocast to bfloat16 (default: on, if there is an accelerator)")

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu, self.bf16 = True, bool(self.bf16)
        super().__post_init__()
        # Of several GPUs one process would use all, by nn.DataParallel, which TRL's trainer refuses.
        self._n_gpu = min(self.n_gpu, 1)


class Options(NamedTuple):
    sft: SftOptions
    model: ModelConfig
    training: SftTraining
    memopt: MemoptArguments

    @property
    def is_quantised(self) -> bool:
        return bool(self.model.load_in_4bit or self.model.load_in_8bit or self.sft.quantize)


def parse(description: str, arguments: Sequence[str] | None = None) -> Options:
    """Read flags and the YAML file of `--config FILE`, which holds any of them without sections."""
    kinds = list(get_type_hints(Options).values())
    parser = HfArgumentParser(kinds, description=description, formatter_class=Formatter, allow_abbrev=False)
    short, of_file = Parser(add_help=False, allow_abbrev=False), Parser(add_help=False, allow_abbrev=False)
    of_file.add_argument("--config")
    add_flags(short, *SHORT, are_alone=False)
    next(each for each in short._actions if each.dest == "quantize").type = _renewed
    path, words = of_file.parse_known_args(list(sys.argv[1:] if arguments is None else arguments))
    said, words = short.parse_known_args(words)
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these flags")
    given = {} if path.config is None else _read(config_file("config", Path(path.config)), parser)
    parser.set_defaults(**given | _long(vars(said)))
    with argparse_raising():
        *sections, _, unknown = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
    refuse_unknown(unknown, parser)
    options = Options(*sections[: len(kinds)])
    _check(options)
    return options


def _long(short: dict[str, Any]) -> dict[str, Any]:
    """Return short flags as fields of TRL."""
    fields = of_job(Job(**short))
    if short.get("quantize") == _IN_8_BITS:
        fields["quantize"] = _IN_8_BITS
    return fields


def _renewed(how: str) -> str:
    """Return the name of torchao's int8 weights for the one that this recipe had, with a warning."""
    if how != "int8":
        return how
    warnings.warn(f"quantize=int8 is now spelled quantize={_IN_8_BITS}", FutureWarning, stacklevel=2)
    return _IN_8_BITS


def _read(file: Path, parser: HfArgumentParser) -> dict[str, Any]:
    source = f"config={str(file)!r}"
    given = read_fields(source, file, "train_sft", "learning_rate: 1.0e-4")
    known = {action.dest for action in parser._actions}
    for name in given:
        if name not in known | set(SHORT):
            refuse_unknown([f"--{name}"], parser)
    short = {name: value for name, value in given.items() if name in SHORT}
    if "quantize" in short:
        short["quantize"] = _renewed(short["quantize"])
    return {name: value for name, value in given.items() if name not in short} | _long(short)


def _check(options: Options) -> None:
    sft, model, _, memopt = options
    if options.is_quantised and not model.use_peft:
        raise ValueError("a base in few bits is frozen, so that adapters have to learn; add --lora_rank or --use_peft")
    if not model.use_peft and memopt.base != "off" and not memopt.trained:
        raise ValueError(
            f"base={memopt.base!r} streams frozen weights, and all of them learn; add --lora_rank or --trained"
        )
    if sft.freeze_layers is not None and model.use_peft:
        raise ValueError(f"freeze_layers={sft.freeze_layers}: adapters freeze all layers; leave one out")
    check_card(sft.plan)
    if sft.plan is not None and memopt.budget_gib is not None:
        raise ValueError(f"plan={sft.plan!r} chooses what is offloaded; leave --budget_gib={memopt.budget_gib} out")


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
