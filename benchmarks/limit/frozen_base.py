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
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import CPU, MIB, BenchmarkParser, environment, print_rows, results_path, write_results
from benchmarks.limit.lora_kinds import KINDS, NO_LIMIT
from hf_memopt.recipes.memory_limit import limits
from hf_memopt.recipes.memory_limit.limited_process import LimitedRun, run_limited
from hf_memopt.transfer.scratch_file import file_system
from hf_memopt.units import GIB

ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
# A run is ended after so many times the time of the run without a limit, at least so many seconds.
TOO_SLOW, TOO_SLOW_S = 5, 60.0

Row = dict[str, Any]


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


class Bench:
    """The runs of all kinds with one base."""

    def __init__(self, base: Path, options: argparse.Namespace, log: Path) -> None:
        self._base, self._options, self._log = base, options, log
        self._size = SIZES[options.size]
        self._runs: dict[str, list[Row]] = {}
        self._limit_s: float | None = None

    def run_all(self) -> Iterator[list[Row]]:
        """Run every kind as often as wanted, and yield the rows so far after each run."""
        for _ in range(self._options.runs):
            for kind in self._options.kinds:
                self._runs.setdefault(kind, []).append(self._run(kind))
                reference = self._runs[NO_LIMIT][0]
                yield [summary(each, runs, reference) for each, runs in self._runs.items()]

    def _run(self, kind: str) -> Row:
        print(f"{kind}: ", end="", flush=True)
        settings = {
            "base": str(self._base),
            "kind": kind,
            "num_tokens": self._size.num_tokens,
            "budget_gib": self._size.budget_gib,
            "num_steps": self._options.steps,
        }
        drop_cached(self._base)
        with limits.memory_limit("group") as limit:
            run = run_limited(
                [sys.executable, "-m", "benchmarks.limit.lora_training", json.dumps(settings)],
                limit,
                None if kind == NO_LIMIT else round(self._size.limit_gib * GIB),
                log=self._log,
                environ=ENVIRONMENT,
                timeout_s=self._limit_s,
                show=lambda event: print("." if event["event"] == "step" else "", end="", flush=True),
            )
        if self._limit_s is None:
            self._limit_s = max(TOO_SLOW_S, TOO_SLOW * run.results["wall_s"])
        print(f" {run.end}, peak {run.peak_bytes / MIB:.0f} MiB", flush=True)
        return row_of(run)


def drop_cached(base: Path) -> None:
    """Have the system drop a folder's files from its cache."""
    for path in base.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def row_of(run: LimitedRun) -> Row:
    names = ("cpu_s", "wall_s", "adapters_digest", "read_bytes_until", "report")
    return {
        "end": run.end,
        "reason": run.reason,
        "losses": run.losses,
        "cpu_s_until": [step["cpu_s"] for step in run.steps],
        "s_until": [step["at_s"] - run.rest.at_s for step in run.steps],
        "rest_bytes": run.rest.anonymous_bytes,
        "peak_bytes": run.peak_bytes,
        **{name: run.results.get(name) for name in names},
    }


def summary(kind: str, runs: list[Row], reference: Row) -> Row:
    """Return the medians of a kind's runs, and whether all that finished have the reference's adapters."""
    finished = [run for run in runs if run["end"] == "finished"]
    are_equal = [all(run[name] == reference[name] for name in ("adapters_digest", "losses")) for run in finished]

    def later(name: str) -> float | None:
        each = [(run[name][-1] - run[name][0]) / (len(run[name]) - 1) for run in finished]
        return statistics.median(each) if each else None

    return {
        "kind": kind,
        "ends": sorted({run["end"] for run in runs}),
        "num_steps": min(len(run["losses"]) for run in runs),
        "peak_bytes": statistics.median(run["peak_bytes"] for run in runs),
        "cpu_s": later("cpu_s_until"),
        "wall_s": later("s_until"),
        "read_bytes": later("read_bytes_until"),
        "first_step_s": statistics.median(run["s_until"][0] for run in finished) if finished else None,
        "adapters_equal": all(are_equal) if finished else None,
        "runs": runs,
    }


def print_report(results: dict[str, Any]) -> None:
    base, size = results["base_bytes"] / GIB, results["sizes"]
    num_runs = min(len(row["runs"]) for row in results["rows"])
    runs = f"medians of {num_runs} runs" if num_runs > 1 else "one run"
    limit, budget = f"{size['limit_gib']:g} GiB", f"budget {size['budget_gib']:g} GiB"
    print(f"LoRA of a base of {base:.2f} GiB in {limit}, {size['num_tokens']} tokens a step, {budget}: {runs}")
    print_rows([_cells(row) for row in results["rows"]])


def _cells(row: Row) -> dict[str, str]:
    end = " or ".join(row["ends"]) + ("" if row["ends"] == ["finished"] else f" in step {row['num_steps'] + 1}")
    cells = {"kind": row["kind"], "end": end, "peak MiB": f"{row['peak_bytes'] / MIB:.0f}"}
    if row["cpu_s"] is None:
        return cells
    return cells | {
        "CPU s / step": f"{row['cpu_s']:.1f}",
        "s / step": f"{row['wall_s']:.1f}",
        "GiB read / step": f"{row['read_bytes'] / GIB:.2f}",
        "first step s": f"{row['first_step_s']:.1f}",
        "adapters": "equal" if row["adapters_equal"] else "DIFFER",
    }


def run(options: argparse.Namespace, output: Path) -> dict[str, Any]:
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        base = options.base or SIZES[options.size].make_base(Path(folder) / "base")
        results: dict[str, Any] = {
            **environment(CPU),
            "benchmark": "limit.frozen_base",
            "file_system": file_system(base),
            "size": options.size,
            "sizes": asdict(SIZES[options.size]),
            "base_bytes": sum(path.stat().st_size for path in base.glob("*.safetensors")),
            "num_steps": options.steps,
            "environment": ENVIRONMENT,
            "kinds": {name: asdict(KINDS[name]) for name in options.kinds},
        }
        for rows in Bench(base, options, Path(folder) / "process.log").run_all():
            results["rows"] = rows
            write_results(results, output)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="besides the run without a limit (all)")
    add("--runs", type=int, default=3, help="of each kind (default: %(default)s)")
    add("--steps", type=int, default=3, help="of each run, at least 2 (default: %(default)s)")
    add("--size", choices=SIZES, default="real", help="of base and limit (default: %(default)s)")
    add("--folder", type=Path, default=Path("outputs/frozen_base"), help="on a local disk (default: %(default)s)")
    add("--base", type=Path, help="folder of a causal language model in safetensors files (default: one is made)")
    options = parser.options(arguments)
    options.kinds = [NO_LIMIT, *(kind for kind in options.kinds if kind != NO_LIMIT)]
    output = options.output or results_path("frozen-base", CPU)
    print_report(run(options, output))
    print("wrote", output)


if __name__ == "__main__":
    main()
