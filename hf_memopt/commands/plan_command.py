"""`hf-memopt plan`."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.command_line import check_output_file, check_output_folder, number
from hf_memopt.ranges import COUNT

if TYPE_CHECKING:
    from hf_memopt.tuning import TrainingPlan, Workload


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="find the fastest settings with which a training run fits a card, without the card",
        description="Simulate micro-batches and memory levers of a recipe or a transformers model on tensors without "
        "memory, and print a table of all candidates, the fastest that fits first. Times are a roofline's: good for "
        "comparing rows, not as milliseconds.",
        epilog="examples: hf-memopt plan --config recipes/configs/lgt.json --gpu 8GiB --output plans/lgt; "
        "hf-memopt plan --model Qwen/Qwen3-8B --seq-len 4096 --effective-batch 64 --gpu rtx4090 --lora-rank 16",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file of a recipe")
    parser.add_argument("--recipe", metavar="NAME", help="which recipe (default: the one that the file is named after)")
    parser.add_argument("--model", help="instead: hub id, folder or config.json of a transformers model")
    parser.add_argument(
        "--seq-len", type=number(COUNT), default=2048, help="with --model: tokens per sample (%(default)s)"
    )
    parser.add_argument("--lora-rank", type=number(COUNT), help="with --model: train adapters of this rank")
    parser.add_argument("--gpu", required=True, help="a card such as rtx4070-laptop, or the size of one such as 8GiB")
    parser.add_argument("--host", help="host memory that may be used, such as 32GiB (default: any)")
    parser.add_argument("--link", help="bandwidth between host and device, such as 12GBps (default: the card's)")
    parser.add_argument(
        "--effective-batch", type=number(COUNT), help="samples per update (default: the configuration's)"
    )
    parser.add_argument("--precision", help="no, bf16, or auto to try both (default: the configuration's, or no)")
    parser.add_argument("--output", type=Path, help="folder for the chosen configuration and an accelerate config")
    parser.add_argument("--explain", action="store_true", help="say why each lever is used or not")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all candidates as JSON")
    parser.add_argument("--workers", type=number(COUNT), help="simulations at once (default: one per core)")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    check_output_file("json", parsed.json)
    check_output_folder("output", parsed.output)
    from hf_memopt.tuning import plan
    from hf_memopt.tuning.settings_table import as_json, explain, headline, table

    workload = _workload(parsed)
    found = plan(workload, gpu=parsed.gpu, host=parsed.host, link=parsed.link, num_workers=parsed.workers)
    print(f"{headline(found)}\n\n{table(found)}")
    if parsed.explain:
        print("\n" + "\n".join(explain(found)))
    if parsed.json:
        parsed.json.write_text(json.dumps(as_json(found), indent=2) + "\n", encoding="utf-8")
    if parsed.output:
        _write(workload, found, parsed.output)
    return 0


def _workload(parsed: argparse.Namespace) -> "Workload":
    from hf_memopt.commands.recipe_workloads import recipe_of, recipe_workload

    if (parsed.model is None) == (parsed.config is None):
        raise ValueError("name either a recipe's --config FILE or a --model")
    if parsed.config is not None:
        name = parsed.recipe or recipe_of(parsed.config)
        return recipe_workload(name, parsed.config, precision=parsed.precision, effective_batch=parsed.effective_batch)
    return _model(parsed)


def _model(parsed: argparse.Namespace) -> "Workload":
    from hf_memopt.tuning.huggingface import HuggingFaceModel

    options: dict[str, Any] = {"seq_len": parsed.seq_len, "lora_rank": parsed.lora_rank}
    return HuggingFaceModel(
        parsed.model,
        effective_batch=1 if parsed.effective_batch is None else parsed.effective_batch,
        precision=parsed.precision or "no",
        **options,
    )


def _write(workload: "Workload", found: "TrainingPlan", folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written = workload.write(found.best.settings, found.best.micro_batch, folder)
    for path in written:
        print(f"wrote {path}")
    print(f"run it with\n  {workload.command(written)}")
