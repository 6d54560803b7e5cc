"""What the campaign measures, the worthiest first: each line is a benchmark with options that it takes by itself."""

import argparse
import importlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.cells import Cell

# Headlines of every workload, then the rest of the tables, then what only refines them.
REAL = [
    (
        "activations.offload",
        "--tokens 32768 --link-divisors 1 --modes none checkpointing 'ours inputs' 'ours auto 20 %' TRL"
        " 'checkpoint offload' save_on_cpu",
    ),
    (
        "teacher.offload",
        "--dtypes bfloat16 --batch-sizes 32 --links --modes resident seed swap swap+shared stream stream+shared"
        " diffusers-leaf diffusers-block accelerate",
    ),
    ("activations.longest", "--workloads layers --cards 8 24"),
    ("operators.memory", "--nodes 512 --cards 8 --batch-sizes 16"),
    ("lgt.memory", "--batch-sizes 240 --euler-steps 10 --steps 4"),
    ("fluxflow.memory", "--batch-sizes 3 4 --variants plain seed ours 'ours checkpointed' --steps 3 --allocators"),
    ("planning.estimate", "--sizes small"),
    ("activations.longest", "--workloads lora --cards 24"),
    ("activations.offload", "--tokens 8192 --link-divisors 1 2"),
    ("activations.offload", "--tokens 32768 --link-divisors 1"),
    ("planning.estimate", "--sizes medium"),
    ("planning.cache_clearing", "--steps 150"),
    ("activations.longest", "--workloads layers --cards 12 16"),
    ("teacher.offload", "--dtypes bfloat16 --batch-sizes 8 32 --links 12 25"),
    ("operators.memory", "--nodes 512 --cards 8 16 24 --batch-sizes 8 16 32"),
    ("fluxflow.memory", "--batch-sizes 3 4 --steps 3 --growth-seconds 40"),
    ("lgt.memory", "--batch-sizes 32 96 240 --euler-steps 5 10 --steps 4"),
    ("teacher.offload", "--dtypes float32 --batch-sizes 8 --links"),
    ("activations.offload", "--tokens 32768 --link-divisors 2 4"),
]
TOY = [
    (
        "activations.offload",
        "--size toy --layers 2 --tokens 64 --steps 2 --link-divisors 1 2 --modes none checkpointing"
        """ 'ours inputs' 'ours auto 20 %' TRL 'checkpoint offload' save_on_cpu 'all above 10 MB' 'none again'""",
    ),
    (
        "teacher.offload",
        "--size toy --dtypes float32 --batch-sizes 2 --links --warmup 1 --steps 2 --seconds-per-cell 1",
    ),
    ("activations.longest", "--size toy --to-tokens 64 --steps 2 --seconds-per-cell 1"),
    ("operators.memory", "--size toy --nodes 16 --batch-size 2 --batch-sizes 2 --steps 2 --seconds-per-cell 1"),
    ("lgt.memory", "--size toy --batch-sizes 2 --euler-steps 1 --steps 2"),
    (
        "fluxflow.memory",
        "--size toy --resolution 16 --batch-sizes 2 2 --steps 2 --no-lpips --allocators default --growth-size toy"
        " --growth-resolution 16 --growth-steps 3",
    ),
    ("planning.estimate", "--sizes toy --models bert"),
]


BENCHMARKS = tuple(dict.fromkeys(benchmark for benchmark, _ in REAL))


def all_cells(device: torch.device, *, toy: bool, card: str | None = None, estimates: Path | None = None) -> list[Cell]:
    """Every cell once, in the order of its first line.

    Args:
        device: whose defaults the benchmarks take.
        toy: whether everything has the smallest size, for a rehearsal.
        card: what estimates are for; None, the one that runs.
        estimates: computed beforehand, so that only measurements take time.
    """
    found: dict[str, Cell] = {}
    for benchmark, line in TOY if toy else REAL:
        arguments = shlex.split(line)
        if benchmark == "planning.estimate":
            arguments += ["--card", card] if card else []
            arguments += ["--estimates", str(estimates)] if estimates else []
        for cell in cells_of(benchmark, arguments, device):
            found.setdefault(cell.title, cell)
    return list(found.values())


def cells_of(benchmark: str, arguments: list[str], device: torch.device) -> Iterator[Cell]:
    module = importlib.import_module(f"benchmarks.{benchmark}")
    options: argparse.Namespace = module.parse(arguments, device)
    return module.cells(options)
