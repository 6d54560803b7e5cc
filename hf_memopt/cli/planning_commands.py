"""`hf-memopt estimate` and `hf-memopt plan`, which simulate the same training steps."""

import argparse
import gc
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from hf_memopt.command_line import check_output_file, check_output_folder
from hf_memopt.planning.job import CHOICES, DEFAULTS, FIELDS, MODEL, Job
from hf_memopt.planning.job_flags import add_flags, add_other_names, flags_named, spec_of

if TYPE_CHECKING:
    from hf_memopt.planning import SettingsPlan, Workload
    from hf_memopt.planning.cards.gpus import Card


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    _add_estimate(commands)
    _add_plan(commands)


def _add_job(parser: argparse.ArgumentParser, command: str, of_job: Callable[[Job], int]) -> None:
    """Add the flags of a command for a job, and have it call `of_job` with that."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument("model", nargs="?", default=argparse.SUPPRESS, **FIELDS["model"].options)
    model.add_argument("--model", default=argparse.SUPPRESS, metavar="MODEL", help="the same")
    parser.add_argument(
        "--spec",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML or JSON with fields named like the flags of estimate and plan, such as seq_len: 4096; flags win "
        "over the file",
    )
    add_other_names(parser)
    flags = [name for name, each in FIELDS.items() if command in each.about.of and name != "model"]
    for title in dict.fromkeys(FIELDS[name].about.group for name in flags):
        group = parser.add_argument_group(title) if title else parser
        add_flags(group, *(name for name in flags if FIELDS[name].about.group == title))

    def run(parsed: argparse.Namespace) -> int:
        # Imports make a million objects that stay, and searching them for garbage took a quarter of the time.
        gc.disable()
        os.environ["WANDB_DISABLED"] = "true"  # TRL would import it, which takes seconds
        try:
            spec = spec_of(parsed)
            # Errors call fields by their flags, but for those whose value is from a file.
            with flags_named({name for name in flags if name in parsed or name not in spec.said()}):
                return of_job(spec)
        finally:
            gc.freeze()  # so that they are not looked through when the process ends, either
            gc.enable()

    parser.set_defaults(run=run)


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
    _add_job(parser, "estimate", _estimate)


def _estimate(spec: Job) -> int:
    card = _card_of(spec)
    for name in ("json", "timeline", "snapshot"):
        check_output_file(name, getattr(spec, name))
    with _files_of(spec):
        return _simulate_and_print(spec, card)


def _simulate_and_print(spec: Job, card: "Card | None") -> int:
    from hf_memopt.planning import estimate_report
    from hf_memopt.planning.cards.memory_below import find_memory_below
    from hf_memopt.planning.estimate import simulate_step
    from hf_memopt.planning.simulation.child_process import run_isolated
    from hf_memopt.planning.workloads.of_job import given_step, workload_of

    if spec.check and not spec.gpu:
        raise ValueError("check=True asks whether it fits on a card, so it needs --gpu")
    if spec.offload == "auto" and not spec.gpu:
        raise ValueError("offload='auto' weighs copies against compute, so it needs --gpu")
    if spec.base_budget is not None and spec.base not in ("host", "file"):
        raise ValueError(f"base_budget={spec.base_budget!r} is for frozen weights that stream; give base=host or file")
    below = find_memory_below(spec.host, spec.disk, needs_no_host="file" in (spec.base, spec.optimizer_home))
    job = workload_of(spec)
    step, passes = given_step(spec, job)
    _show_progress(f"simulating whole steps of {job.name}")
    estimate = run_isolated(lambda: simulate_step(step, gpu=card, below=below))
    estimate = estimate.with_passes(passes / step.num_micro_batches)
    if spec.json:
        spec.json.write_text(json.dumps(estimate_report.as_json(estimate, card), indent=2) + "\n", encoding="utf-8")
    print(f"{job.name}\n\n{estimate.text(card)}{_not_counted(step.num_gpus)}")
    if spec.timeline:
        from hf_memopt.planning import memory_page

        print(f"\ntimeline: {memory_page.write_timeline(estimate, job.name, spec.timeline)}")
    if spec.snapshot:
        from hf_memopt.planning import memory_snapshot

        written = memory_snapshot.write_snapshot(estimate, spec.snapshot)
        print(f"\nsnapshot, for https://pytorch.org/memory_viz: {written}")
    judged = estimate_report.Verdict.FITS if card is None else estimate_report.verdict(estimate, card)
    if judged is estimate_report.Verdict.FITS:
        return 0
    if not spec.is_of_recipe:
        print(f"\nSettings that fit, if there are any: {_plan_command(spec, job)}")
    return 1 if spec.check and judged is estimate_report.Verdict.NO else 0


@contextmanager
def _files_of(spec: Job) -> Iterator[None]:
    """Ask the hub inside only if it answers, and only where a spec may name a model on it."""
    hub: AbstractContextManager[None] = nullcontext()
    if spec.is_of_trainer or not (spec.model is None or Path(spec.model).expanduser().exists()):
        from hf_memopt.planning.models.hub import offline_if_unreachable

        _show_progress("asking the model hub")
        hub = offline_if_unreachable(spec.model)
    with hub:
        _show_progress("reading the configuration")
        yield


def _show_progress(doing: str) -> None:
    """Write a line to standard error if a terminal shows it; a program that reads errors gets none."""
    if sys.stderr.isatty():
        print(f"{doing} ...", file=sys.stderr)


def _card_of(spec: Job) -> "Card | None":
    """Return the card; this comes before the imports that take seconds."""
    from hf_memopt.planning.cards.gpus import find_card

    if spec.gpu is not None:  # an empty name is refused, too
        return find_card(spec.gpu, link=spec.link, reserve=spec.reserve)
    for name in ("link", "reserve"):
        if (text := getattr(spec, name)) is not None:
            raise ValueError(f"{name}={text!r} is about a card, so it needs --gpu")
    return None


def _not_counted(num_gpus: int) -> str:
    return "\n\nOf one GPU. Time for communication is not in it." if num_gpus > 1 else ""


def _plan_command(spec: Job, job: "Workload") -> str:
    said, batch = spec.said(), FIELDS["effective_batch"].words(job.effective_batch)
    words = ["hf-memopt", "plan"]
    words += FIELDS["model"].words(spec.model) if spec.model else []
    words += FIELDS["gpu"].words(spec.gpu)
    has_batch = {"batch_size", "accumulation", "effective_batch"} & said.keys()
    words += batch if spec.training_args is None or has_batch else []
    # A plan tries all homes of frozen weights.
    left_out = {"model", "gpu"} | ({"base"} if not spec.trained else set())
    repeated = {
        name for name, each in FIELDS.items() if "plan" in each.about.of and each.about.group == MODEL
    } - left_out
    again = [name for name in said if name in repeated and (name in CHOICES or said[name] != DEFAULTS.get(name))]
    again += [name for name in ("reserve", "host", "disk", "link") if name in said]
    words += [word for text in spec.set for word in FIELDS["set"].words(text)]
    return shlex.join([*words, *(word for name in again for word in FIELDS[name].words(said[name]))])


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="find the fastest settings with which a training run fits a card, without the card",
        description="Simulate micro-batches and memory levers of a recipe or a transformers model on tensors without "
        "memory, and print a table of all candidates, the fastest that fits first.",
        epilog="examples: hf-memopt plan --config recipes/configs/lgt.json --gpu 8GiB --output plans/lgt; "
        "hf-memopt plan Qwen/Qwen3-8B --seq-len 4096 --effective-batch 64 --gpu rtx4090 --lora-rank 16",
    )
    _add_job(parser, "plan", _plan)


def _plan(spec: Job) -> int:
    check_output_file("json", spec.json)
    source = spec.model or spec.training_args or spec.config or spec.recipe or "plan"
    folder = spec.output or Path("plans") / Path(source).expanduser().absolute().with_suffix("").name
    check_output_folder("output", folder)
    if spec.gpu is None:
        raise ValueError("a plan is for a card: name one, or a size such as 8GiB, with --gpu")
    card = _card_of(spec)
    assert card is not None
    if spec.set and spec.is_of_recipe:
        raise ValueError(f"set={spec.set[0]!r}: a plan tries all values of a recipe's levers; leave it out")
    with _files_of(spec):
        from hf_memopt.planning import plan
        from hf_memopt.planning.search.table import as_json, explain
        from hf_memopt.planning.workloads.of_job import workload_of

        job = workload_of(spec)
        found = plan(job, gpu=card, host=spec.host, disk=spec.disk, num_workers=spec.workers)
    print(f"{found}{_not_counted(spec.num_gpus or 1)}")
    if spec.explain:
        print("\n" + "\n".join(explain(found)))
    if spec.json:
        spec.json.write_text(json.dumps(as_json(found), indent=2) + "\n", encoding="utf-8")
    _write(job, found, folder)
    return 0


def _write(job: "Workload", found: "SettingsPlan", folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written = job.write(found.best.settings, found.best.micro_batch, folder)
    command = job.command(written)
    needed = f", after pip install {shlex.join(job.packages)}" if job.packages else ""
    print(f"\nRun it with the files in {folder}{needed}:\n  {command}")
    if found.best.estimate.disk_bytes:
        print(_missing_folder(folder, command))


def _missing_folder(folder: Path, command: str) -> str:
    """Return the request to name a folder on the disk, which a plan knows by its size and speed alone."""
    from hf_memopt.planning.models.accelerate_config import NVME_FOLDER

    of_deepspeed = folder / "deepspeed.json"
    if of_deepspeed.name in (folder / "accelerate.yaml").read_text(encoding="utf-8"):
        return f"First change {NVME_FOLDER} in {of_deepspeed} to a folder on the disk."
    place = " before the --" if " -- " in command else ""
    return f"Add --disk FOLDER{place}: a folder on the disk, for the bytes that are to be there."
