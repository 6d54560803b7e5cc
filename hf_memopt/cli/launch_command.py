"""`hf-memopt launch`: `accelerate launch` of a script that does not use this library."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_memopt.command_line import Parser
from hf_memopt.process_trees import COMMAND

_DESCRIPTION = """\
Start SCRIPT, or -m MODULE, with accelerate launch. hf_memopt.attach is called on every Trainer and TRL
trainer that it makes. The models that an Accelerator prepares offload what their forward passes save."""
_FLAGS = """\
FLAGS are those of accelerate launch and the following, the fields of MemoptArguments:

  --offload MODE             off, auto (default), all or inputs: which saved activations leave the
                             device, for host memory or for --disk
  --budget_gib GIB           auto: device memory that saved activations may hold
  --max_slowdown SHARE       auto without a budget: share of the step's time that offloading may cost (default: 0.03)
  --offload_threshold_mb MIB smaller storages stay on the device (default: 10)
  --prefetch_ahead N         how many storages backward brings back ahead of their use (default: 2)
  --no_pin_memory            ordinary host memory
  --host_budget_gib GIB      host memory to use at most
  --disk FOLDER              on a local disk: takes what host memory has no room for; on a CPU, all that is offloaded
  --disk_budget_gib GIB      room on that disk to use at most
  --skip NAME [NAME ...]     modules whose saved tensors stay on the device: names or classes, with wildcards
  --cpu_copies               on a CPU: perform the copies, to try it out
  --base HOME                off (default), auto, host or file: home of a Trainer's frozen weights, from which they
                             visit the device in forward and backward: host memory, or their safetensors files;
                             those without such a file are written to one in --disk
  --base_budget_gib GIB      device memory that the frozen weights may take; the more, the less is copied
  --trained                  weights that train have that home, too, with their gradients and the optimizer's state
  --frozen MODE              off (default), auto, resident, swap or stream: where TRL's reference model, teacher and
                             reward models wait for their calls
  --frozen_home HOME         host (default) or file: where they wait, in host memory or in their safetensors files
  --optimizer_home HOME      off (default), host or file: where the optimizer's state lives between updates, in host
                             memory or in a file in --disk
  --optimizer_budget_gib GIB device memory for optimizer state that stays
  --selective_checkpointing  checkpoint the model's blocks, but keep the results of their expensive operations
  --fit                      decide all of this, as hf-memopt fit does, with the flags of accelerate launch
  --memory_gib GIB           fit: device memory that training may take; on a CPU that of the process
  --max_waiting SHARE        fit: end training that waits for more than this share of the time in which it computes
  --no_memory_log            do not log peak memory with the loss, nor explain out-of-memory errors
  --leak_check               warn once if every step leaves memory behind
  --memory_report            when training ends, write report/report.html into the output folder

HF_MEMOPT="offload=auto,budget_gib=6" in the environment means the same; flags override it.

example: hf-memopt launch --budget_gib 6 --mixed_precision bf16 -- train.py --learning_rate 1e-4"""
_USAGE = "hf-memopt launch [FLAGS] -- SCRIPT [ARGUMENTS]"


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "launch",
        help="start a training script with accelerate launch, attached to every Trainer and Accelerator that it makes",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_FLAGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prefix_chars="\0",  # so that argparse leaves all words but --help to accelerate and the script
        add_help=False,
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_launch, parser=parser)


def _launch(parsed: argparse.Namespace) -> int:
    flags, script = cut_at_script(parsed.words)
    if {"-h", "--help"} & set(flags):
        parsed.parser.print_help()
        return 0
    check_script(script, _USAGE)
    from hf_memopt.callbacks.arguments import VARIABLE, MemoptArguments, words_of

    given = os.environ.get(VARIABLE, "")
    MemoptArguments.from_text(given)  # its mistakes are named as its own
    arguments, accelerates = MemoptArguments.from_words([*words_of(given), *flags])
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *accelerates]
    command = [*launcher, "-m", "hf_memopt.callbacks.every_trainer", *script]
    environment = {VARIABLE: arguments.to_text(), COMMAND: str(os.getpid())}
    return subprocess.run(command, env=os.environ | environment).returncode


def flags_parser(command: str, usage: str, description: str, epilog: str) -> Parser:
    """Return a parser of the flags that stand before `--` and a script."""
    return Parser(
        prog=f"hf-memopt {command}",
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def cut_at_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    cut = words.index("--") if "--" in words else len(words)
    return list(words[:cut]), list(words[cut + 1 :])


def check_script(script: Sequence[str], usage: str) -> None:
    if not script:
        raise ValueError(f"-- and a script must follow the flags: {usage}")
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise ValueError(f"SCRIPT={script[0]!r} is not a file; check the path, or run a module with -m MODULE")
