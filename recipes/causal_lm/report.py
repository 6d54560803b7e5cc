"""The report of `train_causal_lm.py`: results.json, and losses, memory and time as a figure."""

import logging
from pathlib import Path
from typing import Any

from hf_memopt.recipes.causal_lm.data import describe_corpus
from hf_memopt.recipes.causal_lm.step import Run
from hf_memopt.recipes.common.comparison import read_costs
from hf_memopt.recipes.common.results import RunCost, can_draw, drawn, plot_history, run_results, table, write_results
from hf_memopt.weights.optimizer import report_of

logger = logging.getLogger(__name__)


def results(run: Run, cost: RunCost) -> dict[str, Any]:
    final = [entry for entry in run.progress.history if "eval_loss" in entry][-1]
    more = {"corpus": describe_corpus(run.options.data), "final": final, "optimizer": report_of(run.optimizer)}
    return run_results(run, cost, libraries=("transformers", "datasets"), **more)


def write(results: dict[str, Any], output: Path) -> None:
    """Write `results.json`, and `results.png` with the modes that `hf-memopt compare` measured in this folder."""
    write_results(results, output)
    training = [results["training_cost"]]
    if can_draw("results.png"):
        draw(results, read_costs(output) or training, output / "results.png")
    logger.info("\n" + table(training, results["device"]))
    if results["optimizer"] is not None:
        logger.info(f"{results['optimizer']}")


def draw(results: dict[str, Any], costs: list[RunCost], file: Path) -> None:
    modes, on_cpu = [cost.mode for cost in costs], results["device"] == "cpu"
    with drawn(file, 1, 3, dpi=110, figsize=(13, 3.8)) as (learning, memory, speed):
        plot_history(learning, results["history"], "update", {"loss": "training"}, "-")
        plot_history(learning, results["history"], "update", {"eval_loss": "held out"}, "o-")
        learning.set(title=f"Loss, mode {results['mode']}", xlabel="updates", ylabel="nats per token")
        learning.legend()
        memory.bar(modes, [(cost.saved_mib if on_cpu else cost.peak_mib) or 0 for cost in costs], color="#dd8452")
        memory.set(title="Saved activations on the device" if on_cpu else "Peak memory of the device", ylabel="MiB")
        speed.bar(modes, [cost.step_ms or 0 for cost in costs], color="#4c72b0")
        speed.set(title="Median time of an update" + (" (CPU)" if on_cpu else ""), ylabel="ms")
        for axes in (learning, memory, speed):
            axes.grid(alpha=0.3)
