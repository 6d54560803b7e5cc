"""Estimated against measured device memory of training steps.

    python benchmarks/estimate.py
    python benchmarks/estimate.py --recipe train_causal_lm=flags.args --recipe train_neural_operator=darcy.args

Every step is first estimated, without the device, and then really run on it from the same code: transformers models
with random weights, without and with activation checkpointing, and recipes, in three sizes; and recipes with the
configurations that are given, such as a student's folder for reflow_smolvla. Without an accelerator toy models are
estimated and nothing is measured.
"""

import argparse
import gc
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState
from common import current_device, environment, free_memory, print_table, results_path, write_results
from transformers import AutoConfig

from hf_memopt.planning.cards import CARDS
from hf_memopt.planning.estimate import estimate_peak_memory
from hf_memopt.planning.huggingface import HuggingFaceModel
from hf_memopt.planning.workload import SimulatedStep

MIB = 2**20
# Hidden size, layers, sequence length, batch size.
SIZES = {
    "toy": (64, 2, 32, 2),
    "small": (768, 12, 1024, 8),
    "medium": (1536, 24, 2048, 4),
    "large": (2560, 32, 4096, 2),
}
MODELS = {
    "qwen3": {"vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 8192},
    "gpt_neox": {"vocab_size": 50432, "max_position_embeddings": 8192},
    "bert": {"vocab_size": 30522, "max_position_embeddings": 8192},
    "vit": {"image_size": 224, "patch_size": 16},
}
TOY_VOCABULARY = 512


def _llama(hidden: int, layers: int, block: int, batch: int) -> list[str]:
    shape = f"hidden_size={hidden},intermediate_size={4 * hidden},num_hidden_layers={layers}"
    heads = f"num_attention_heads={hidden // 64},num_key_value_heads={hidden // 64},head_dim=64"
    overrides = f"--config_overrides={shape},{heads},max_position_embeddings={block}"
    return [overrides, f"--block_size={block}", f"--per_device_batch_size={batch}", "--offload=off"]


def _darcy(resolution: int) -> list[str]:
    return [f"--resolution={resolution}", f"--test_resolutions={resolution}", "--batch_size=8", "--offload=off"]


def _images(resolution: int) -> list[str]:
    return [f"--resolution={resolution}", "--batch_size=2", "--lpips_weights=random", "--offload=off"]


def _latents(batch_size: int, num_steps: int) -> dict[str, Any]:
    sizes = {"batch_size": batch_size, "accumulation_steps": 1, "ode_integration_steps": num_steps}
    return {"training": {**sizes, "use_amp": True}}


# What each recipe is started with: flags, or a configuration.
RECIPES: dict[str, dict[str, Any]] = {
    "causal_lm": {
        "small": _llama(512, 8, 1024, 4),
        "medium": _llama(1024, 16, 1024, 4),
        "large": _llama(2048, 16, 2048, 2),
    },
    "neural_operator": {"small": _darcy(128), "medium": _darcy(256), "large": _darcy(512)},
    "lgt": {"small": _latents(32, 5), "medium": _latents(32, 10), "large": _latents(96, 10)},
    "fluxflow": {"small": _images(128), "medium": _images(256), "large": _images(512)},
}
TARGETS = {"worst_deviation": 0.05, "median_deviation": 0.03}


class Cell(NamedTuple):
    """One row of the results."""

    name: str
    size: str
    settings: str
    step: SimulatedStep


def write_config(model_type: str, size: str, folder: Path) -> Path:
    """A configuration of this size."""
    hidden, layers, _, _ = SIZES[size]
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    settings = {**MODELS[model_type], **sizes, "num_attention_heads": max(4, hidden // 64)}
    if size == "toy" and "vocab_size" in settings:
        settings["vocab_size"] = TOY_VOCABULARY
    AutoConfig.for_model(model_type, **settings).save_pretrained(folder)
    return folder


def model_cells(options: argparse.Namespace, folder: Path) -> Iterator[Cell]:
    for model_type in options.models:
        for size in options.sizes:
            _, _, seq_len, batch = SIZES[size]
            config = write_config(model_type, size, folder / f"{model_type}-{size}")
            for precision in ("no", "bf16"):
                workload = HuggingFaceModel(str(config), seq_len, batch, precision=precision)
                for checkpointing in ("none", "full"):
                    step = workload.step_with(checkpointing, "off", batch)
                    yield Cell(model_type, size, f"precision {precision}, checkpointing {checkpointing}", step)


def recipe_cells(options: argparse.Namespace, folder: Path) -> Iterator[Cell]:
    """Recipes in the sizes that there are, and those that are given."""
    for name, sizes in RECIPES.items():
        for size in [size for size in options.sizes if size in sizes]:
            yield recipe_cell(name, size, write_recipe(name, sizes[size], folder / f"{name}-{size}"))
    for given in options.recipe:
        name, _, config = given.partition("=")
        yield recipe_cell(name, config, Path(config))


def write_recipe(name: str, content: Any, path: Path) -> Path:
    """The file that the recipe is started with."""
    text = json.dumps(content) if isinstance(content, dict) else "".join(f"{line}\n" for line in content)
    path.write_text(text, encoding="utf-8")
    return path


def recipe_cell(name: str, size: str, config: Path) -> Cell:
    """The recipe with its configuration, its levers at their first values."""
    module = importlib.import_module(f"hf_memopt.recipes.{name.removeprefix('train_')}_plan")
    workload = module.workload(config)
    settings = {lever.name: lever.values[0] for lever in workload.levers}
    step = workload.simulated(settings, workload.effective_batch)
    return Cell(name, size, f"batch {workload.effective_batch}", step)


def estimated(step: SimulatedStep) -> dict[str, Any]:
    begun = time.perf_counter()
    estimate = estimate_peak_memory(step.setup, step.step, num_steps=step.num_steps, card=CARDS["h200"])
    modelled = estimate.trace.allocator()
    return {
        "estimated_allocated_bytes": modelled.peak_allocated_bytes,
        "estimated_reserved_bytes": modelled.peak_reserved_bytes,
        "phase": estimate.phase,
        "confidence": estimate.confidence,
        "estimate_s": round(time.perf_counter() - begun, 2),
    }


def measured(step: SimulatedStep, device: torch.device) -> dict[str, Any]:
    """The same step on the device. Nothing is left there afterwards."""
    AcceleratorState._reset_state(reset_partial_state=True)  # the last step's may have another precision
    free_memory(device)
    before = torch.accelerator.memory_allocated(device)
    state = step.setup(device)
    gc.collect()
    torch.accelerator.reset_peak_memory_stats(device)
    for _ in range(step.num_steps):
        step.step(state)
    torch.accelerator.synchronize(device)
    return {
        "measured_allocated_bytes": torch.accelerator.max_memory_allocated(device) - before,
        "measured_reserved_bytes": torch.accelerator.max_memory_reserved(device),
    }


def estimated_row(cell: Cell) -> dict[str, Any]:
    """One cell; that it cannot be estimated is a result."""
    found: dict[str, Any] = {"model": cell.name, "size": cell.size, "settings": cell.settings}
    try:
        return found | estimated(cell.step)
    except Exception as error:
        return found | {"error": f"{type(error).__name__}: {error}"[:500]}


def measured_row(found: dict[str, Any], cell: Cell, device: torch.device) -> dict[str, Any]:
    """An estimate and what the device says; that the step does not run there is a result."""
    if "error" in found:
        return found
    try:
        found = found | measured(cell.step, device)
    except Exception as error:
        return found | {"error": f"{type(error).__name__}: {error}"[:500]}
    return found | {"deviation": found["estimated_allocated_bytes"] / found["measured_allocated_bytes"] - 1}


def summarised(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    deviations = [abs(each["deviation"]) for each in rows if "deviation" in each]
    if not deviations:
        return {"worst_deviation": None, "median_deviation": None}
    return {"worst_deviation": max(deviations), "median_deviation": statistics.median(deviations)}


def print_report(rows: Sequence[dict[str, Any]], device: torch.device) -> None:
    def mib(value: int | None) -> str:
        return "-" if value is None else f"{value / MIB:,.1f}"

    cells = [
        [
            f"{each['model']} {each['size']}, {each['settings']}",
            mib(each.get("estimated_allocated_bytes")),
            mib(each.get("measured_allocated_bytes")),
            f"{each['deviation']:+.2%}" if "deviation" in each else each.get("error", "-")[:60],
        ]
        for each in rows
    ]
    print_table(["step", "estimated MiB", "measured MiB", "deviation"], cells)
    if device.type == "cpu":
        print("Nothing was measured: there is no accelerator here.")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Estimate, run and compare; returns what is written."""
    device = current_device()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["toy"] if device.type == "cpu" else ["small", "medium", "large"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=sizes)
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME=FILE", help="also this recipe")
    parser.add_argument("--output", type=Path, help="results file (default: in results/, by hardware)")
    options = parser.parse_args(arguments)
    output = options.output or results_path("estimate", device)
    results = {**environment(device), "benchmark": "estimate", "targets": TARGETS, "rows": [], "complete": False}
    with tempfile.TemporaryDirectory() as folder:
        cells = [*model_cells(options, Path(folder)), *recipe_cells(options, Path(folder))]
        # All estimates first: a simulation cannot be forked once backward has run on an accelerator.
        rows = [estimated_row(cell) for cell in cells]
        for cell, found in zip(cells, rows, strict=True):
            results["rows"].append(found if device.type == "cpu" else measured_row(found, cell, device))
            write_results(results, output)
    results |= {**summarised(results["rows"]), "complete": True}
    write_results(results, output)
    print_report(results["rows"], device)
    print(f"results: {output}")
    return results


if __name__ == "__main__":
    main()
