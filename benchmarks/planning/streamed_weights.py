"""Predicted peak and time of LoRA on streamed weights, for one shape, without a GPU.

    python -m benchmarks.planning.streamed_weights

The step is a whole training step of a decoder shaped like Llama-3-8B in bfloat16: adapters of rank 16 on all linear
layers, one sequence, full checkpointing, a loss in tiles. It runs on tensors without memory, as `hf-memopt estimate`
has it. The second table says from how many tokens in a forward pass on its compute hides the copies of the weights:
waiting takes no more than a twentieth of the step then. It is of a quarter of the model, layers and vocabulary, which
computes and copies in the same proportion.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common import CPU, BenchmarkParser, environment, finish, print_table
from hf_memopt.planning import Job, MemoryEstimate
from hf_memopt.planning.cards.gpus import find_card
from hf_memopt.planning.cards.memory_below import Disk, MemoryBelow
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.estimate_report import Verdict, needed_bytes, verdict
from hf_memopt.planning.simulation.child_process import run_all_isolated
from hf_memopt.planning.workloads.of_job import given_step, workload_of

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
QUARTER = {"num_hidden_layers": 8, "vocab_size": 32064}
OPTIONS = {"dtype": "bfloat16", "lora_rank": 16, "loss": "chunked"}
TOKENS = 4096
# Of the first table: the card, a small one of its size.
CARD = "rtx4070-laptop"
CARDS = ("rtx4070-laptop", "rtx3060ti", "rtx3090", "rtx4090", "h100")
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
HIDDEN_SHARE = 0.05
# Of an estimate, that results have.
FIGURES = ("peak_bytes", "host_bytes", "step_ms", "step_range_ms", "stall_ms", "breakdown")


@dataclass(frozen=True)
class Home:
    """A home of the weights, and the speed of its disk."""

    base: str
    disk_bytes_per_s: float | None = None

    @property
    def name(self) -> str:
        return self.base if self.disk_bytes_per_s is None else f"{self.base} at {self.disk_bytes_per_s / 1e9:g} GB/s"


RESIDENT = Home("off")
# From the fastest to the slowest.
HOMES = (Home("host"), Home("file", 7e9), Home("file", 3e9))


class Predictions:
    """Estimates of steps on a shape, whose configuration is written to a folder."""

    def __init__(self, folder: Path, shape: dict[str, Any]) -> None:
        self._config = folder / "config.json"
        self._config.write_text(json.dumps(shape))

    def step(self, home: Home, gpu: str, tokens: int, loss: str = "chunked") -> MemoryEstimate:
        options: dict[str, Any] = {**OPTIONS, "loss": loss}
        job = Job(str(self._config), seq_len=tokens, base=home.base, batch_size=1, checkpointing="full", **options)
        step, _ = given_step(job, workload_of(job))
        disk = None if home.disk_bytes_per_s is None else Disk(None, home.disk_bytes_per_s)
        return simulate_step(step, gpu=find_card(gpu), below=MemoryBelow(None, disk))

    def row(self, loss: str, home: Home, tokens: int) -> dict[str, Any]:
        estimate, card = self.step(home, CARD, tokens, loss), find_card(CARD)
        return {
            "loss": loss,
            "home": home.name,
            **{name: getattr(estimate, name) for name in FIGURES},
            "needed_bytes": needed_bytes(estimate, card),
            "fits": verdict(estimate, card) is Verdict.FITS,
            "streamed": asdict(estimate.streamed) if estimate.streamed else None,
        }

    def hidden_from(self, gpu: str, lengths: Sequence[int]) -> dict[str, Any]:
        """Return for each home the first length at which copies are hidden; None, they are not at the last one."""
        found: dict[str, Any] = {"gpu": gpu, "link_gb_per_s": find_card(gpu).link_bytes_per_s / 1e9}
        shortest = 0
        for home in HOMES:
            shortest = self._first_hidden(home, gpu, lengths, shortest)
            found[home.name] = lengths[shortest] if shortest < len(lengths) else None
        return found

    def _first_hidden(self, home: Home, gpu: str, lengths: Sequence[int], low: int) -> int:
        high = len(lengths)
        while low < high:
            middle = (low + high) // 2
            found = self.step(home, gpu, lengths[middle])
            assert found.step_ms is not None
            assert found.stall_ms is not None
            if found.stall_ms <= HIDDEN_SHARE * found.step_ms:
                high = middle
            else:
                low = middle + 1
        return low


def measure(toy: bool, cards: Sequence[str], workers: int) -> dict[str, Any]:
    tokens, lengths = (64, (16, 64)) if toy else (TOKENS, LENGTHS)
    with tempfile.TemporaryDirectory() as folder:
        whole = Predictions(Path(folder), SHAPE | (TOY if toy else {}))
        steps = _in_order(
            [partial(whole.row, loss, home, tokens) for loss in ("full", "chunked") for home in (RESIDENT, *HOMES)],
            workers,
        )
        quarter = Predictions(Path(folder), SHAPE | (TOY if toy else QUARTER))
        hidden = _in_order([partial(quarter.hidden_from, gpu, lengths) for gpu in cards], workers)
    return {"tokens": tokens, "lengths": lengths, "steps": steps, "hidden_from_tokens": hidden}


def _in_order(functions: Sequence[Callable[[], dict[str, Any]]], workers: int) -> list[dict[str, Any]]:
    """Return the results of functions that run in processes of their own."""
    numbered = (lambda number=number: (number, functions[number]()) for number in range(len(functions)))
    found = dict(tqdm(run_all_isolated(numbered, workers), total=len(functions), unit="simulation"))
    return [found[number] for number in range(len(functions))]


def print_report(results: dict[str, Any]) -> None:
    steps = [["loss", "home", "peak GiB", "needs GiB", "fits", "host GiB", "brought GiB", "step s", "waiting s"]]
    for row in results["steps"]:
        brought = row["streamed"]["bytes_to_device"] / 2**30 if row["streamed"] else 0.0
        sizes = [f"{row[key] / 2**30:.2f}" for key in ("peak_bytes", "needed_bytes")]
        times = [f"{(row[key] or 0.0) / 1e3:.2f}" for key in ("step_ms", "stall_ms")]
        fitting = "yes" if row["fits"] else "no"
        host = f"{row['host_bytes'] / 2**30:.2f}"
        steps.append([row["loss"], row["home"], *sizes, fitting, host, f"{brought:.2f}", *times])
    shape = results["shape"]
    print(
        f"predicted for {results['predicted_for']}, not measured: LoRA of {shape['num_hidden_layers']} layers of width "
        f"{shape['hidden_size']:,}, {results['tokens']:,} tokens"
    )
    print_table(steps[0], steps[1:])
    names = [home.name for home in HOMES]
    hidden = [["card", "link GB/s", *names]]
    for row in results["hidden_from_tokens"]:
        longest = f"more than {results['lengths'][-1]:,}"
        cells = [longest if row[name] is None else f"{row[name]:,}" for name in names]
        hidden.append([row["gpu"], f"{row['link_gb_per_s']:g}", *cells])
    print("\ntokens in a step from which copies are hidden, predicted for each card")
    print_table(hidden[0], hidden[1:])


def main(arguments: list[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--cards", nargs="+", default=CARDS, help="of the second table (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="simulations at once (default: %(default)s)")
    parser.add_argument("--toy", action="store_true", help="a tiny shape, for a test")
    options = parser.options(arguments)
    results = {
        **environment(CPU),
        "benchmark": "planning.streamed_weights",
        "predicted_for": CARD,
        "shape": {**SHAPE, **(TOY if options.toy else {})},
        "options": OPTIONS,
        **measure(options.toy, options.cards, options.workers),
    }
    finish(results, print_report, options.output, "streamed-weights-predicted")


if __name__ == "__main__":
    main()
