"""LoRA of a base that is larger than the memory: in memory, mapped from its files, and streamed from them.

    python -m benchmarks.limit.frozen_base --folder FOLDER_ON_A_DISK

Each run is a process of its own, alone, in a control group of its own; the kinds take turns. Before a run the system
drops the base's files from its cache, so that pages of them which a run maps count in its own group. The limit applies
from the imports on, before the model is loaded. "mapped" is transformers' own way to load: the system reads pages of
the files when they are touched, and drops them when the limit comes near.

"peak" is anonymous memory, sampled every few milliseconds. The first step includes loading; the costs per step are
those of the later steps. CPU time is that of all threads, in user space and in the system. "GiB read" is the system's
count of bytes that disks have sent to the process. "equal" are losses and trained adapters, bit for bit. For all kinds,
threads that wait for each other sleep (`OMP_WAIT_POLICY`), and glibc gives larger blocks back as soon as they are freed
(`MALLOC_MMAP_THRESHOLD_`).
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import print_rows
from benchmarks.limit import limited
from benchmarks.limit.limited import Row
from benchmarks.limit.limited_process import ENVIRONMENT
from hf_memopt.transfer.scratch_file import file_system
from hf_memopt.units import GIB

# A run is ended after so many times the time of the run without a limit.
TOO_SLOW = 5


@dataclass(frozen=True)
class Kind:
    is_copied: bool = False  # weights are copied out of the files' mapping into memory
    is_checkpointed: bool = False  # activations are computed again in backward
    is_streamed: bool = False  # `StreamedWeights` reads the weights from the files
    has_budget: bool = False  # and keeps as many of them as its budget has room for


NO_LIMIT = "in memory, no limit"
KINDS = {
    NO_LIMIT: Kind(is_copied=True),
    "in memory": Kind(is_copied=True),
    "mapped": Kind(),
    "mapped, checkpointing": Kind(is_checkpointed=True),
    "ours": Kind(is_streamed=True),
    "ours, checkpointing": Kind(is_checkpointed=True, is_streamed=True),
    "ours, checkpointing, budget": Kind(is_checkpointed=True, is_streamed=True, has_budget=True),
}


@dataclass(frozen=True)
class Size:
    """Sizes of the base, in the proportions of a Llama, and of its training."""

    width: int
    inner_width: int
    num_layers: int
    vocabulary: int
    num_tokens: int
    limit_gib: float
    budget_gib: float

    def make_base(self, folder: Path) -> Path:
        """Write a base with random weights to files."""
        from transformers import LlamaConfig, LlamaForCausalLM  # seconds, which printing results does not need

        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner_width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.width // 64,
            num_key_value_heads=self.width // 256,
            tie_word_embeddings=False,
        )
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="1GB")
        torch.set_default_dtype(torch.float32)
        return folder


SIZES = {
    "real": Size(
        width=2048, inner_width=8192, num_layers=28, vocabulary=32_000, num_tokens=256, limit_gib=2, budget_gib=1
    ),
    "toy": Size(
        width=1024, inner_width=4096, num_layers=14, vocabulary=4_000, num_tokens=32, limit_gib=0.75, budget_gib=0.1
    ),
}


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    size = SIZES[options.size]
    base = options.base or size.make_base(folder / "base")
    processes = limited.Processes("lora_training", folder, limit_kind="group", too_slow=TOO_SLOW)
    facts = {
        "file_system": file_system(base),
        "sizes": asdict(size),
        "base_bytes": sum(path.stat().st_size for path in base.glob("*.safetensors")),
        "num_steps": options.steps,
        "environment": ENVIRONMENT,
        "kinds": {name: asdict(KINDS[name]) for name in options.kinds},
    }

    def run(kind: str) -> Row:
        limited.drop_cached(base)
        settings = {"base": str(base), "kind": kind, "num_tokens": size.num_tokens, "budget_gib": size.budget_gib}
        limit_bytes = None if kind == NO_LIMIT else round(size.limit_gib * GIB)
        found = processes.run(kind, options.steps, settings, limit_bytes)
        row = limited.row_of(found, ("cpu_s", "wall_s", "adapters_digest", "read_bytes_until", "report"))
        return row | {"s_until": [step["at_s"] - found.rest.at_s for step in found.steps]}

    for rows in limited.in_turns([(kind,) for kind in options.kinds], options.runs, run, summary):
        yield {**facts, "rows": rows}


def summary(kind: str, runs: list[Row], reference: Row) -> Row:
    """Return the medians of a kind's runs, and whether all that finished have the reference's adapters."""

    def later(name: str) -> float | None:
        return limited.median((run[name][-1] - run[name][0]) / (len(run[name]) - 1) for run in limited.finished(runs))

    return {
        "kind": kind,
        "cpu_s": later("cpu_s_until"),
        "wall_s": later("s_until"),
        "read_bytes": later("read_bytes_until"),
        "first_step_s": limited.median(run["s_until"][0] for run in limited.finished(runs)),
        "adapters_equal": limited.are_equal(runs, reference, ("adapters_digest", "losses")),
        **limited.summary_of(runs, ()),
    }


def print_report(results: dict[str, Any]) -> None:
    base, size = results["base_bytes"] / GIB, results["sizes"]
    num_runs = min(len(row["runs"]) for row in results["rows"])
    runs = f"medians of {num_runs} runs" if num_runs > 1 else "one run"
    limit, budget = f"{size['limit_gib']:g} GiB", f"budget {size['budget_gib']:g} GiB"
    print(f"LoRA of a base of {base:.2f} GiB in {limit}, {size['num_tokens']} tokens a step, {budget}: {runs}")
    print_rows([_cells(row) for row in results["rows"]])


def _cells(row: Row) -> dict[str, str]:
    cells = {"kind": row["kind"], **limited.common_cells(row)}
    if row["cpu_s"] is None:
        return cells
    return cells | {
        "CPU s / step": f"{row['cpu_s']:.1f}",
        "s / step": f"{row['wall_s']:.1f}",
        "GiB read / step": f"{row['read_bytes'] / GIB:.2f}",
        "first step s": f"{row['first_step_s']:.1f}",
        "adapters": "equal" if row["adapters_equal"] else "DIFFER",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = limited.make_parser("frozen_base", __doc__, KINDS, SIZES)
    add = parser.add_argument
    add("--steps", type=int, default=3, help="of each run, at least 2 (default: %(default)s)")
    add("--base", type=Path, help="folder of a causal language model in safetensors files (default: one is made)")
    limited.run_benchmark(parser.options(arguments), measure, print_report)


if __name__ == "__main__":
    main()
