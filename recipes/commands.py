"""`hf-memopt compare` and `configs`, which setup.cfg adds to the command: recipes in several modes, shipped files."""

import argparse

from hf_memopt.command_line import number
from hf_memopt.planning.job import CHOICES
from hf_memopt.ranges import Range
from hf_memopt.recipes.common.shipped_configs import configs_folder

RECIPES = ("causal_lm", "fluxflow", "lgt", "neural_operator")
MODES = CHOICES["offload"]
_AT_LEAST = Range(at_least=4, whole=True, why=": the first half only warms up")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    _add_compare(commands)
    _add_configs(commands)


def _add_compare(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "compare",
        help="measure a recipe's update in several modes of offloading, and check that all compute the same bits",
        usage="hf-memopt compare RECIPE [--modes off,all,auto] [--steps N] [the recipe's own flags]",
        description="Start a recipe anew in each mode, in a process of its own, from the same weights and with the "
        "same batches. Measure time and peak memory of an update and the bytes moved, and check that losses and "
        "weights are bitwise those of mode off. Write comparison.json into the recipe's output folder, where "
        "hf-memopt report reads it. The exit status is 1 if a mode differs.",
        epilog="example: hf-memopt compare causal_lm --modes off,auto --text_file book.txt --budget_gib 6. All other "
        "flags are the recipe's: python -m hf_memopt.recipes.train_causal_lm --help. Precision and "
        "device are accelerate's: accelerate launch --mixed_precision bf16 -m hf_memopt.cli compare ...",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", type=_recipe, choices=RECIPES, help=", ".join(RECIPES))
    parser.add_argument(
        "--modes", type=_modes, default=("off", "auto"), help=f"of {', '.join(MODES)}; off first (default: off,auto)"
    )
    parser.add_argument(
        "--steps",
        type=number(_AT_LEAST),
        default=12,
        metavar="N",
        help="updates per mode; the second half is timed (default: %(default)s)",
    )
    parser.set_defaults(run=_compare, passes_on=True)


def _recipe(name: str) -> str:
    return name.removeprefix("train_")


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{text!r} has no mode {unknown[0]!r}; choose from {', '.join(MODES)}")
    if modes[0] != "off" or len(modes) < 2 or len(set(modes)) < len(modes):
        raise argparse.ArgumentTypeError(
            f"{text!r} must name off first, which the others are compared with, and each mode once: off,all,auto"
        )
    return modes


def _compare(parsed: argparse.Namespace) -> int:
    from hf_memopt.recipes.common.comparison import compare

    same = compare(f"train_{parsed.recipe}", parsed.passed_on, parsed.modes, parsed.steps)
    return 0 if same else 1


def _add_configs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "configs",
        help="print the folder of the shipped configurations",
        description="Print the folder of the configurations that the pages call recipes/configs. Recipes find them by "
        'name; accelerate does not: accelerate launch --config_file "$(hf-memopt configs)/accelerate/ddp.yaml".',
    )
    parser.set_defaults(run=_configs)


def _configs(parsed: argparse.Namespace) -> int:
    print(configs_folder())
    return 0
