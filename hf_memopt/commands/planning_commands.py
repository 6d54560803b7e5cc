"""`hf-memopt estimate` and `hf-memopt plan`, which simulate the same training steps."""

import argparse
import gc
import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.command_line import check_output_file, check_output_folder, number
from hf_memopt.commands import model_flags, training_file
from hf_memopt.ranges import COUNT

if TYPE_CHECKING:
    from hf_memopt.estimate.simulated_step import SimulatedStep
    from hf_memopt.jobs import Lever, SettingsPlan, Workload

_GPU = "a card (a100-80gb, 4090, ...), a size (8GiB), or a size with a card's speed (48GiB@l40s)"


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Look for no garbage: imports make a million objects that stay, and searching them took a quarter of the time.

    The objects there in the end are not looked through when the process ends, either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    _add_estimate(commands)
    _add_plan(commands)


# --------------------------------------------------------------------------------------------------- estimate


def _add_estimate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "estimate",
        help="say how much device memory a training step needs, without the device",
        description="Run whole training steps (forward, backward, clipping, optimizer with its state) on tensors "
        "without memory, by CUDA's rules, and print the peak: its phase, what it consists of, and what was assumed. "
        "This needs only the configuration, and downloads or allocates no weights.",
        epilog="example: hf-memopt estimate Qwen/Qwen3-8B --seq-len 8192 --precision bf16 --checkpointing full --gpu "
        "h100. The device context and the workspaces of cuDNN are not simulated; named allowances are added for them.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="hub id, folder or config.json of a transformers model"
    )
    parser.add_argument("--recipe", metavar="NAME", help="instead of MODEL: a recipe, such as train_causal_lm")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the recipe's configuration file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="one of the recipe's levers; may be repeated"
    )
    step = parser.add_argument_group("the step")
    step.add_argument(
        "--batch-size", type=number(COUNT), default=1, help="samples per forward pass (default: %(default)s)"
    )
    step.add_argument(
        "--accumulation", type=number(COUNT), help="forward passes per update (default: 1, or the recipe's)"
    )
    model_flags.add_to(parser, checkpointing_and_offload=True)
    output = parser.add_argument_group("output")
    output.add_argument("--gpu", help=f"say whether it fits: {_GPU}")
    output.add_argument("--check", action="store_true", help="exit status 1 if it does not fit on --gpu")
    output.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    output.add_argument("--timeline", type=Path, metavar="FILE.html", help="also draw memory over the step, by kind")
    output.add_argument(
        "--snapshot",
        type=Path,
        metavar="FILE.pickle",
        help="also write a memory snapshot, which https://pytorch.org/memory_viz opens like that of a real run",
    )
    parser.set_defaults(run=_run_estimate)


@_without_collecting()
def _run_estimate(parsed: argparse.Namespace) -> int:
    check_output_file("json", parsed.json)
    check_output_file("timeline", parsed.timeline)
    check_output_file("snapshot", parsed.snapshot)
    from hf_memopt.estimate import estimate_report
    from hf_memopt.estimate.estimate import simulate_step
    from hf_memopt.estimate.gpus import find_card
    from hf_memopt.estimate.simulation.child_process import run_isolated

    if parsed.check and not parsed.gpu:
        raise ValueError("check=True asks whether it fits on a card, so it needs --gpu")
    card = find_card(parsed.gpu) if parsed.gpu else None
    workload, step = _step(parsed)
    estimate = run_isolated(lambda: simulate_step(step, gpu=card))
    accumulation = workload.effective_batch // (parsed.batch_size * step.num_gpus)
    estimate = estimate.with_passes(accumulation / step.num_micro_batches)
    if parsed.json:
        parsed.json.write_text(json.dumps(estimate_report.as_json(estimate, card), indent=2) + "\n", encoding="utf-8")
    print(f"{workload.name}\n\n{estimate_report.text(estimate, card)}{_not_counted(step.num_gpus)}")
    if parsed.timeline:
        from hf_memopt.estimate import memory_page

        print(f"\ntimeline: {memory_page.write_timeline(estimate, workload.name, parsed.timeline)}")
    if parsed.snapshot:
        from hf_memopt.estimate import memory_snapshot

        written = memory_snapshot.write_snapshot(estimate, parsed.snapshot)
        print(f"\nsnapshot, for https://pytorch.org/memory_viz: {written}")
    if card is None or estimate_report.fits(estimate, card):
        return 0
    if not parsed.recipe:
        print(f"\nSettings that fit, if there are any: {_plan_command(parsed)}")
    return 1 if parsed.check else 0


def _not_counted(num_gpus: int) -> str:
    from hf_memopt.jobs.accelerate_config import NOT_COUNTED

    return f"\n\nOf one GPU. {NOT_COUNTED}" if num_gpus > 1 else ""


def _plan_command(parsed: argparse.Namespace) -> str:
    """Return the command that looks for settings with which the same model fits the same card."""
    if parsed.training_args:
        return shlex.join(["hf-memopt", "plan", "--gpu", parsed.gpu, *training_file.flags(parsed)])
    batch = parsed.batch_size * (parsed.accumulation or 1) * parsed.num_gpus
    words = ["hf-memopt", "plan", "--model", parsed.model, "--gpu", parsed.gpu, "--effective-batch", str(batch)]
    return shlex.join([*words, *model_flags.given(parsed)])


def _step(parsed: argparse.Namespace) -> "tuple[Workload, SimulatedStep]":
    if parsed.recipe:
        return _recipe_step(parsed)
    if parsed.training_args:
        _check_offload(parsed)
        workload = training_file.workload_of(parsed)
        parsed.batch_size = workload.micro_batch
        parsed.accumulation = workload.effective_batch // workload.micro_batch
        return workload, workload.as_given(parsed.offload or "off")
    return _model_step(parsed)


def _model_step(parsed: argparse.Namespace) -> "tuple[Workload, SimulatedStep]":
    if parsed.model is None:
        raise ValueError("name a MODEL (hub id, folder or config.json), or a --recipe with its --config")
    _check_offload(parsed)
    workload = model_flags.model_of(parsed, parsed.batch_size * (parsed.accumulation or 1) * parsed.num_gpus)
    checkpointing, offload = parsed.checkpointing or "none", parsed.offload or "off"
    return workload, workload.step_with(checkpointing, offload, parsed.batch_size)


def _check_offload(parsed: argparse.Namespace) -> None:
    if parsed.offload == "auto" and not parsed.gpu:
        raise ValueError("offload='auto' weighs copies against compute, so it needs --gpu")


def _recipe_step(parsed: argparse.Namespace) -> "tuple[Workload, SimulatedStep]":
    from hf_memopt.commands.recipe_workloads import recipe_workload

    _refuse_ranks(parsed)
    if parsed.model is not None:
        raise ValueError(f"recipe={parsed.recipe!r} and MODEL={parsed.model!r}: name one of them")
    batch = None if parsed.accumulation is None else parsed.batch_size * parsed.accumulation
    workload = recipe_workload(parsed.recipe, parsed.config, effective_batch=batch)
    settings = {each.name: each.values[0] for each in workload.levers} | _chosen(parsed.set, workload.levers)
    return workload, workload.simulated(settings, parsed.batch_size)


def _refuse_ranks(parsed: argparse.Namespace) -> None:
    if parsed.num_gpus > 1 or parsed.engine:
        raise ValueError(f"num_gpus={parsed.num_gpus}: recipes are simulated on one GPU; give --num-gpus with a model")


def _chosen(texts: Sequence[str], levers: "Sequence[Lever]") -> dict[str, Any]:
    values = {(each.name, str(value)): value for each in levers for value in each.values}
    chosen = {}
    for text in texts:
        name, _, value = text.partition("=")
        if (name, value) not in values:
            known = "; ".join(f"{each.name}={'|'.join(map(str, each.values))}" for each in levers)
            raise ValueError(f"set={text!r} is not a value of a lever; there are {known}")
        chosen[name] = values[name, value]
    return chosen


# ------------------------------------------------------------------------------------------------------- plan


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="find the fastest settings with which a training run fits a card, without the card",
        description="Simulate micro-batches and memory levers of a recipe or a transformers model on tensors without "
        "memory, and print a table of all candidates, the fastest that fits first.",
        epilog="examples: hf-memopt plan --config recipes/configs/lgt.json --gpu 8GiB --output plans/lgt; "
        "hf-memopt plan --model Qwen/Qwen3-8B --seq-len 4096 --effective-batch 64 --gpu rtx4090 --lora-rank 16",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file of a recipe")
    parser.add_argument("--recipe", metavar="NAME", help="which recipe (default: the one that the file is named after)")
    parser.add_argument("--model", help="instead: hub id, folder or config.json of a transformers model")
    parser.add_argument("--gpu", required=True, help=_GPU)
    parser.add_argument("--host", help="host memory that may be used, such as 32GiB (default: any)")
    parser.add_argument("--link", help="bandwidth between host and device, such as 12GBps (default: the card's)")
    parser.add_argument(
        "--effective-batch", type=number(COUNT), help="samples per update (default: the configuration's)"
    )
    model_flags.add_to(parser, recipes_precisions=("auto",))
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, help="folder for the chosen configuration and an accelerate config")
    output.add_argument("--explain", action="store_true", help="say why each lever is used or not")
    output.add_argument("--json", type=Path, metavar="FILE", help="also write all candidates as JSON")
    parser.add_argument("--workers", type=number(COUNT), help="simulations at once (default: one per core)")
    parser.set_defaults(run=_run_plan)


@_without_collecting()
def _run_plan(parsed: argparse.Namespace) -> int:
    check_output_file("json", parsed.json)
    check_output_folder("output", parsed.output)
    from hf_memopt.jobs import plan
    from hf_memopt.jobs.settings_table import as_json, explain

    workload = _workload(parsed)
    found = plan(workload, gpu=parsed.gpu, host=parsed.host, link=parsed.link, num_workers=parsed.workers)
    print(f"{found}{_not_counted(parsed.num_gpus)}")
    if parsed.explain:
        print("\n" + "\n".join(explain(found)))
    if parsed.json:
        parsed.json.write_text(json.dumps(as_json(found), indent=2) + "\n", encoding="utf-8")
    if parsed.output:
        _write(workload, found, parsed.output)
    return 0


def _workload(parsed: argparse.Namespace) -> "Workload":
    from hf_memopt.commands.recipe_workloads import recipe_of, recipe_workload

    if parsed.training_args:
        return training_file.workload_of(parsed)
    if (parsed.model is None) == (parsed.config is None):
        raise ValueError("name either a recipe's --config FILE or a --model")
    if parsed.config is None:
        return model_flags.model_of(parsed, parsed.effective_batch or parsed.num_gpus)
    _refuse_ranks(parsed)
    name = parsed.recipe or recipe_of(parsed.config)
    return recipe_workload(name, parsed.config, precision=parsed.precision, effective_batch=parsed.effective_batch)


def _write(workload: "Workload", found: "SettingsPlan", folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written = workload.write(found.best.settings, found.best.micro_batch, folder)
    for path in written:
        print(f"wrote {path}")
    print(f"run it with\n  {workload.command(written)}")
