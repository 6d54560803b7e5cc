"""The training steps that are estimated and measured: transformers models with random weights, and recipes.

A step is described by JSON values, so that a file of estimates identifies its steps exactly.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    PreTrainedModel,  # noqa: F401 (half of the imports of a model, once for all cells)
)

from hf_memopt.planning import Job
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.workloads.of_job import given_step, recipe_workload, workload_of

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
_KEPT = {"offload": {"offload": "off"}}


def _llama(hidden: int, layers: int, block: int, batch: int) -> dict[str, Any]:
    shape = f"hidden_size={hidden},intermediate_size={4 * hidden},num_hidden_layers={layers}"
    heads = f"num_attention_heads={hidden // 64},num_key_value_heads={hidden // 64},head_dim=64"
    overrides = f"{shape},{heads},max_position_embeddings={block}"
    sizes = {"data": {"block_size": block}, "training": {"per_device_batch_size": batch}}
    return {"model": {"config_overrides": overrides}, **sizes, **_KEPT}


def _darcy(resolution: int) -> dict[str, Any]:
    data = {"resolution": resolution, "test_resolutions": [resolution]}
    return {"data": data, "training": {"batch_size": 8}, **_KEPT}


def _images(resolution: int) -> dict[str, Any]:
    sizes = {"data": {"resolution": resolution}, "training": {"batch_size": 2}}
    return {**sizes, "losses": {"lpips_weights": "random"}, **_KEPT}


def _latents(batch_size: int, num_steps: int) -> dict[str, Any]:
    sizes = {"batch_size": batch_size, "accumulation_steps": 1, "ode_integration_steps": num_steps}
    return {"training": {**sizes, "use_amp": True}}


# The configuration of each recipe.
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

Definition = dict[str, Any]


def model_steps(models: Sequence[str], sizes: Sequence[str]) -> Iterator[tuple[str, Definition]]:
    for model in models:
        for size in sizes:
            _, _, seq_len, batch_size = SIZES[size]
            shape = {"model": model, "config": _config(model, size), "seq_len": seq_len, "batch_size": batch_size}
            for precision in ("no", "bf16"):
                for checkpointing in ("none", "full"):
                    name = f"{model} {size}, precision {precision}, checkpointing {checkpointing}"
                    yield name, {**shape, "precision": precision, "checkpointing": checkpointing}


def recipe_steps(
    recipes: Sequence[str], sizes: Sequence[str], given: Sequence[str]
) -> Iterator[tuple[str, Definition]]:
    """Yield the same of recipes in their sizes, and of recipes given as NAME=FILE."""
    for recipe in recipes:
        for size in (size for size in sizes if size in RECIPES[recipe]):
            yield f"{recipe} {size}", {"recipe": recipe, "start": RECIPES[recipe][size]}
    for each in given:
        recipe, _, file = each.partition("=")
        yield f"{recipe} {file}", {"recipe": recipe, "file": file, "start": Path(file).read_text(encoding="utf-8")}


def simulated_step(definition: Definition, folder: Path) -> SimulatedStep:
    folder.mkdir(parents=True, exist_ok=True)
    return _recipe_step(definition, folder) if "recipe" in definition else _model_step(definition, folder)


def _config(model: str, size: str) -> dict[str, int]:
    hidden, layers, _, _ = SIZES[size]
    config = {**MODELS[model], "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    if size == "toy" and "vocab_size" in config:
        config["vocab_size"] = TOY_VOCABULARY
    return {**config, "num_attention_heads": max(4, hidden // 64)}


def _model_step(definition: Definition, folder: Path) -> SimulatedStep:
    AutoConfig.for_model(definition["model"], **definition["config"]).save_pretrained(folder)
    seq_len, batch_size, precision = (definition[name] for name in ("seq_len", "batch_size", "precision"))
    settings = {"precision": precision, "checkpointing": definition["checkpointing"], "loss": "full"}
    job = Job(str(folder), seq_len=seq_len, batch_size=batch_size, dtype="float32", **settings)
    return given_step(job, workload_of(job))[0]


def _recipe_step(definition: Definition, folder: Path) -> SimulatedStep:
    """Return a recipe's step with its levers at their first values."""
    if "file" in definition:
        file = Path(definition["file"])
    else:
        file = folder / "start.json"
        file.write_text(json.dumps(definition["start"]), encoding="utf-8")
    workload: Any = recipe_workload(definition["recipe"], file)
    settings = {lever.name: lever.values[0] for lever in workload.levers}
    step: SimulatedStep = workload.simulated(settings, workload.effective_batch)
    return step
