"""`hf-memopt estimate`."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.command_line import check_output_file, number, or_none
from hf_memopt.ranges import COUNT, POSITIVE

if TYPE_CHECKING:
    from hf_memopt.tuning import Lever, SimulatedStep


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "estimate",
        help="say how much device memory a training step needs, without the device",
        description="Run whole training steps (forward, backward, clipping, optimizer with its state) on tensors "
        "without memory, by CUDA's rules, and print the peak: in which phase it is, what it consists of, what was "
        "assumed. No weight is downloaded or allocated; the configuration is enough.",
        epilog="example: hf-memopt estimate Qwen/Qwen3-8B --seq-len 8192 --precision bf16 --checkpointing full --gpu "
        "h100. Batches have no padding. Not simulated, and added as named allowances: the device context and the "
        "workspaces of libraries.",
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
        "--accumulation", type=number(COUNT), help="forward passes per update (default: 1; a recipe's own)"
    )
    model = parser.add_argument_group("with MODEL")
    for name, default, text in (
        ("task", "auto", "auto, causal, masked, seq2seq or image-classification"),
        ("dtype", "float32", "of the weights: float32 or bfloat16"),
        ("precision", "no", "of accelerate's autocast: no, bf16 or fp16"),
        ("attention", "auto", "auto, sdpa or eager"),
        ("optimizer", "adamw", "adamw (fused), adamw-foreach (torch's default), sgd or adafactor"),
        ("checkpointing", "none", "of activations: none, selective or full"),
        ("offload", "off", "of activations: off, auto, inputs or all"),
    ):
        model.add_argument(f"--{name}", default=default, help=f"{text} (default: {default})")
    model.add_argument("--seq-len", type=number(COUNT), default=2048, help="tokens per sample (default: %(default)s)")
    model.add_argument(
        "--lora-rank", type=number(COUNT), help="train adapters of this rank on all linear layers (default: none)"
    )
    model.add_argument(
        "--max-grad-norm",
        type=or_none(number(POSITIVE)),
        default=1.0,
        help="gradients are clipped to this norm; none: they are not (default: %(default)s)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--gpu", help="a card (rtx4070-laptop, h100, ...) or a size (8GiB): say whether it fits")
    output.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    output.add_argument("--timeline", type=Path, metavar="FILE.html", help="also draw memory over the step, by kind")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    check_output_file("json", parsed.json)
    check_output_file("timeline", parsed.timeline)
    from hf_memopt.estimate import estimate_report, memory_page
    from hf_memopt.estimate.estimate import estimate_peak_memory
    from hf_memopt.estimate.gpus import CARDS, find_card

    card = find_card(parsed.gpu) if parsed.gpu else None
    name, step = _recipe_step(parsed) if parsed.recipe else _model_step(parsed)
    # Where copies go, and how long they take, is a matter of some card; which one decides times, and the kernels of
    # attention.
    estimate = estimate_peak_memory(step.setup, step.step, num_steps=step.num_steps, card=card or CARDS["rtx4070"])
    if card is None:
        estimate = dataclasses.replace(estimate, step_ms=None, stall_ms=None)
    if parsed.json:
        parsed.json.write_text(json.dumps(estimate_report.as_json(estimate, card), indent=2) + "\n", encoding="utf-8")
    print(f"{name}\n\n{estimate_report.text(estimate, card)}")
    if parsed.timeline:
        print(f"\ntimeline: {memory_page.write_timeline(estimate, name, parsed.timeline)}")
    return 0


def _model_step(parsed: argparse.Namespace) -> tuple[str, "SimulatedStep"]:
    from hf_memopt.tuning.huggingface import HuggingFaceModel

    if parsed.model is None:
        raise ValueError("name a MODEL (hub id, folder or config.json), or a --recipe with its --config")
    if parsed.offload == "auto" and not parsed.gpu:
        raise ValueError("offload='auto' weighs copies against compute, so it needs --gpu")
    names = ("task", "dtype", "precision", "attention", "optimizer", "seq_len", "lora_rank")
    workload = HuggingFaceModel(
        parsed.model,
        effective_batch=parsed.batch_size * (1 if parsed.accumulation is None else parsed.accumulation),
        max_grad_norm=parsed.max_grad_norm,
        **{name: getattr(parsed, name) for name in names},
    )
    return workload.name, workload.step_with(parsed.checkpointing, parsed.offload, parsed.batch_size)


def _recipe_step(parsed: argparse.Namespace) -> tuple[str, "SimulatedStep"]:
    from hf_memopt.commands.recipe_workloads import recipe_workload

    if parsed.model is not None:
        raise ValueError(f"recipe={parsed.recipe!r} and MODEL={parsed.model!r}: name one of them")
    batch = None if parsed.accumulation is None else parsed.batch_size * parsed.accumulation
    workload = recipe_workload(parsed.recipe, parsed.config, effective_batch=batch)
    settings = {lever.name: lever.values[0] for lever in workload.levers} | _chosen(parsed.set, workload.levers)
    return workload.name, workload.simulated(settings, parsed.batch_size)


def _chosen(texts: Sequence[str], levers: "Sequence[Lever]") -> dict[str, Any]:
    values = {(lever.name, str(value)): value for lever in levers for value in lever.values}
    chosen = {}
    for text in texts:
        name, _, value = text.partition("=")
        if (name, value) not in values:
            known = "; ".join(f"{lever.name}={'|'.join(map(str, lever.values))}" for lever in levers)
            raise ValueError(f"set={text!r} is no value of a lever; there are {known}")
        chosen[name] = values[name, value]
    return chosen
