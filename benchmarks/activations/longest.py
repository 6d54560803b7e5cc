"""The longest sequence that trains on cards of 8, 12, 16 and 24 GB, and its speed, by mode.

    python -m benchmarks.activations.longest

The workloads are layers of Qwen3-8B's widths that fill half a card, and LoRA fine-tuning of a whole model of that
shape, in bfloat16. Sequences grow by half an octave until one does not fit; a limit on torch's allocator emulates the
card's capacity, not its speed or its link. Each mode on each card has a process of its own. Without an accelerator toys
run on the CPU, without a limit.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.activations.lora import LoraWork, build
from benchmarks.activations.model import SIZES, Work, build_model, flash_attention, prepared_device, saved_by
from benchmarks.activations.modes import MODES, OURS, Handling, Setting, require_host_memory, settle
from benchmarks.cells import Cell, Report, Row, UnavailableError, run_cells
from benchmarks.common import (
    BenchmarkParser,
    current_device,
    free_memory,
    host_limit_gib,
    limit_memory,
    print_table,
    results_path,
)
from benchmarks.targets import Verdict, ratio
from benchmarks.timing import timed

COMPARED = ("none", "checkpointing", "checkpoint offload", "TRL", "save_on_cpu", "ours inputs", "ours auto")
GROWTH = 2**0.5
MULTIPLE = 32  # lengths are multiples of so many tokens
WORKLOADS = ("layers", "lora")
# First lengths. A plain pass at this length, which has to fit beside the weights, counts the bytes per token.
FROM_TOKENS = {"real": {"layers": 1024, "lora": 256}, "toy": {"layers": 64, "lora": 64}}
LORA_GB = 24  # smallest card that holds 8 billion parameters in bfloat16
TARGETS = {"of": "ours inputs", "over": "checkpointing", "times_longer": 2.0}


def measure(settings: dict[str, Any], folder: Path) -> Row:
    device = prepared_device()
    work = make_work(settings, device)
    limit_memory(settings["card_gb"])
    host_limit_bytes = round(settings["host_limit_gib"] * 2**30)
    found: Row = {"longest_tokens": 0, "stopped_by": "the limit of lengths"}
    with flash_attention(device):
        saved = saved_by(work)
        setting = Setting(work.model, device, saved, host_limit_bytes)
        handling = MODES[settings["mode"]](setting)
        for num_tokens in lengths(settings["from_tokens"], settings["to_tokens"]):
            try:
                require_host_memory(
                    settings["mode"], saved.scaled(num_tokens / settings["from_tokens"]), host_limit_bytes
                )
                found |= trained(work.longer(num_tokens), handling, device, settings)
            except (torch.OutOfMemoryError, UnavailableError) as error:
                found["stopped_by"] = f"{type(error).__name__}: {error}".splitlines()[0]
                break
            found["longest_tokens"] = num_tokens
            free_memory(device)
    return found


def make_work(settings: dict[str, Any], device: torch.device) -> Work | LoraWork:
    if settings["workload"] == "lora":
        return build(settings["size"], settings["from_tokens"], device)
    model = build_model(settings["size"], settings["layers"], device)
    return Work.make(model, settings["from_tokens"], device)


def lengths(shortest: int, longest: int) -> Iterator[int]:
    for step in itertools.count():
        length = round(shortest * GROWTH**step / MULTIPLE) * MULTIPLE
        if length > longest:
            return
        yield length


def trained(work: Work | LoraWork, handling: Handling, device: torch.device, settings: dict[str, Any]) -> Row:
    def step() -> None:
        work.step(handling.context)

    settle(handling, step, 1)
    found = timed(step, device, max_steps=settings["steps"], max_seconds=settings["seconds_per_cell"])
    if found:
        found["tokens_per_s"] = 1e3 * work.tokens.shape[1] / found["step_ms"]["median"]
    return found


def print_report(results: dict[str, Any]) -> None:
    cells = results["cells"]
    for workload in dict.fromkeys(cell["workload"] for cell in cells):
        here = [cell for cell in cells if cell["workload"] == workload]
        cards = list(dict.fromkeys(cell["card_gb"] for cell in here))
        print(f"\nlongest sequence, {workload}: tokens, and tokens per second there")
        header = ["mode", *("no limit" if card_gb is None else f"{card_gb:g} GB" for card_gb in cards)]
        found = {(cell["mode"], cell["card_gb"]): cell for cell in here}
        modes = dict.fromkeys(cell["mode"] for cell in here)
        print_table(header, [[mode, *(_entry(found.get((mode, card_gb))) for card_gb in cards)] for mode in modes])
    print()
    for verdict in verdicts(results):
        print(verdict)


def _entry(cell: Row | None) -> str:
    if cell is None or "error" in cell:
        return "-" if cell is None else cell["error"].partition(":")[0]
    speed = f" ({cell['tokens_per_s']:,.0f}/s)" if "tokens_per_s" in cell else ""
    return f"{cell['longest_tokens']:,}{speed}"


def verdicts(results: dict[str, Any]) -> Iterator[Verdict]:
    target, cells = results["targets"], results["cells"]
    for workload, card_gb in dict.fromkeys((cell["workload"], cell["card_gb"]) for cell in cells):
        if card_gb is not None:
            here = {c["mode"]: c for c in cells if (c["workload"], c["card_gb"]) == (workload, card_gb)}
            ours, theirs = (here.get(target[name], {}).get("longest_tokens") for name in ("of", "over"))
            what = f"{workload}, {card_gb:g} GB, longest with {target['of']} / {target['over']}"
            yield Verdict(what, ratio(ours, theirs), target["times_longer"], at_least=True)


REPORT = Report(TARGETS, print_report, is_ours=lambda row: row["mode"] in OURS)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    shared = {name: getattr(options, name) for name in ("size", "steps", "seconds_per_cell", "host_limit_gib")}
    for workload in options.workloads:
        cards = options.cards if workload == "layers" else [gb for gb in options.cards if gb is None or gb >= LORA_GB]
        lengths = {"from_tokens": FROM_TOKENS[options.size][workload], "to_tokens": options.to_tokens}
        for card_gb in cards:
            for mode in options.modes:
                num_layers = max(2, round(options.layers_per_gb * (card_gb or 0)))
                what = {"workload": workload, "card_gb": card_gb, "layers": num_layers, "mode": mode, **lengths}
                card = "" if card_gb is None else f", {card_gb:g} GB"
                needs = {"TRL": ("trl",)}.get(mode, ()) + (("peft",) if workload == "lora" else ())
                yield Cell("activations.longest", f"{workload}, {mode}{card}", {**what, **shared}, needs)


def main(arguments: list[str] | None = None) -> int:
    device = current_device()
    on_cpu = device.type == "cpu"
    parser = BenchmarkParser(__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="toy" if on_cpu else "real", help="of the models (here: %(default)s)")
    add("--layers-per-gb", type=float, default=0.5, help="of the card, in the layers' workload (default: %(default)s)")
    add("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS, help="default: both")
    add("--cards", nargs="+", type=float, default=[None] if on_cpu else [8, 12, 16, 24], help="GB (here: %(default)s)")
    add("--modes", nargs="+", choices=MODES, default=COMPARED, help="default: %(default)s")
    add("--to-tokens", type=int, default=512 if on_cpu else 131072, help="to try at most (here: %(default)s)")
    add("--host-limit-gib", type=float, default=host_limit_gib(), help="host memory to take (here: %(default)s)")
    add("--steps", type=int, default=3, help="timed steps of each length, at most (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=2.0, help="stop timing a length after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=1800.0, help="of the whole run (default: %(default)s)")
    options = parser.options(arguments)
    output = options.output or results_path(f"longest-{options.size}", device)
    return run_cells("activations.longest", list(cells(options)), output, time_limit_s=options.time_limit_s)


if __name__ == "__main__":
    sys.exit(main())
