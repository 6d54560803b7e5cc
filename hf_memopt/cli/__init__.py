"""The `hf-memopt` command. Subcommands import their libraries when they run, so that `--help` is quick."""

import argparse
import difflib
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from hf_memopt import __version__
from hf_memopt.command_line import TRACEBACK_FLAG, Parser, one_line_errors
from hf_memopt.process_trees import end_tree_on_signals

_GREETING = """\
hf-memopt: train in the memory you have. Nine things that it does:

  hf-memopt estimate MODEL --gpu rtx4090    does my job fit? The peak of a training step, without a GPU
  hf-memopt plan MODEL --gpu 8GiB           which settings are the fastest that fit, and the command to run them
  hf-memopt fit -- train.py                 your script, unchanged, in the memory that there is: it decides everything
  hf-memopt launch -- train.py              your script, unchanged, with the parts that you choose moved out of memory
  hf-memopt verify --switch X -- train.py   does a memory switch, anybody's, change a bit of training?
  hf-memopt compare RECIPE                  memory and time of a recipe with and without offloading, compared bit by bit
  hf-memopt doctor                          what this machine can do
  hf-memopt report RUN_DIR                  a page of a run: memory, losses, time
  hf-memopt prepare-student                 a SmolVLA policy that needs one step: then precompute, evaluate, export
  from hf_memopt import ...                 in your own loop: ActivationOffloader, OffloadedTeacher, train_step;
                                            in a Trainer: attach(trainer)

hf-memopt --help lists all commands, COMMAND --help the options of one; hf-memopt completion bash completes both."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; user errors go to standard error and give 2."""
    if arguments is None:
        end_tree_on_signals()
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = next((argument for argument in given if argument != TRACEBACK_FLAG), "")
    return one_line_errors(f"hf-memopt {command}".rstrip(), _run, given)


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(_GREETING)
        return 0
    parser = _parser(arguments[0])
    parsed, others = parser.parse_known_args(arguments)
    parsed.passed_on = others
    if others and not getattr(parsed, "passes_on", False):
        parser.error(f"unrecognized arguments: {' '.join(others)}{_nearest(parser, arguments[0], others[0])}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # lerobot prints five tracebacks where FFmpeg is missing, and then reads video by other means.
    logging.getLogger("lerobot.utils.import_utils").setLevel(logging.ERROR)
    # diffusers, which lerobot imports, warns of a torchao that nothing here makes it load.
    logging.getLogger("diffusers.quantizers.torchao.torchao_quantizer").setLevel(logging.ERROR)
    status: int = parsed.run(parsed)
    return status


def _nearest(parser: Parser, command: str, word: str) -> str:
    """Return the flag of a command that is most like a word, for a message."""
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    shown = [each for each in commands.choices[command]._actions if each.help != argparse.SUPPRESS]
    flags = [flag for action in shown for flag in action.option_strings]
    found = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
    return f"; the nearest is {found[0]}" if found else ""


def _parser(command: str = "") -> Parser:
    """Return the parser of all commands; those of other packages are left out where `command` is one of ours."""
    from hf_memopt.cli import (
        fit_command,
        launch_command,
        machine_commands,
        planning_commands,
        smolvla_commands,
        verify_command,
    )

    parser = Parser(
        prog="hf-memopt",
        description="Train in the memory you have.",
        epilog="A mistake gives one line and exit status 2; --traceback shows Python's traceback.",
    )
    parser.add_argument("--version", action="version", version=f"hf_memopt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in (smolvla_commands, machine_commands, planning_commands, fit_command, launch_command, verify_command):
        module.add_to(commands)
    if command not in commands.choices:
        for each in entry_points(group="hf_memopt.commands"):
            each.load()(commands)
    completion = commands.add_parser("completion", help="print a script that completes commands and options with Tab")
    completion.add_argument("shell", choices=("bash", "zsh"), help="for which shell")
    completion.set_defaults(run=_complete)
    return parser


def _complete(parsed: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(_parser(), parsed.shell))
    return 0
