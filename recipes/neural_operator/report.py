"""The report of `train_neural_operator.py`: results.json, and panels of predictions beside the truth."""

import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from hf_memopt.recipes.common.results import RunCost, drawn, num_parameters, run_results, table, write_results
from hf_memopt.recipes.neural_operator.data import Data, describe
from hf_memopt.recipes.neural_operator.step import Run
from hf_memopt.text_table import Table

logger = logging.getLogger(__name__)


def results(run: Run, cost: RunCost) -> dict[str, Any]:
    options = run.options
    more = {
        "loop": options.training.loop,
        "model": options.model,
        "num_parameters": num_parameters(run.model),
        "data": {"source": describe(options.data), **asdict(options.data)},
        "train_loss": options.training.train_loss,
        "final": run.progress.history[-1],
    }
    return run_results(run, cost, libraries=("neuraloperator",), **more)


def write(results: dict[str, Any], model: nn.Module, samples: Data, output: Path) -> None:
    write_results(results, output)
    draw(list(predictions(model, samples)), output / "panels.png")
    costs = table([results["training_cost"]], results["device"])
    logger.info(f"\n{errors_table(results)}\n\n{costs}")


def errors_table(results: dict[str, Any]) -> str:
    trained, final = results["data"]["resolution"], results["final"]
    rows = [
        [resolution, final[f"l2_{resolution}"], final[f"h1_{resolution}"], "trained" * (resolution == trained)]
        for resolution in results["data"]["test_resolutions"]
    ]
    return str(Table(["resolution", "relative L2", "relative H1", ""], rows, digits=4))


def predictions(model: nn.Module, samples: Data) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield `input`, `truth`, `prediction` and `error` of each resolution's first test sample.

    They are of the first channel, `(nodes,)` or `(height, width)`; a volume is cut in its middle.
    """
    model.eval()
    samples.processor.eval()
    for resolution, dataset in samples.tests.items():
        batch = samples.processor.preprocess(default_collate([dataset[0]]))
        with torch.no_grad():
            prediction, batch = samples.processor.postprocess(model(batch["x"]), batch)
        fields = {"input": batch["x"], "truth": batch["y"], "prediction": prediction}
        fields["error"] = (prediction - batch["y"]).abs()
        yield resolution, {name: _shown(value[0, 0]).float().cpu() for name, value in fields.items()}


def _shown(field: Tensor) -> Tensor:
    return field[len(field) // 2] if field.ndim == 3 else field


def draw(rows: list[tuple[int, dict[str, Tensor]]], file: Path) -> None:
    with drawn(file, len(rows), 4, figsize=(11, 2.6 * len(rows)), squeeze=False) as axes:
        for line, (resolution, fields) in zip(axes, rows, strict=True):
            smallest, largest = fields["truth"].min().item(), fields["truth"].max().item()
            for axis, (name, values) in zip(line, fields.items(), strict=True):
                like_truth = name in ("truth", "prediction")
                axis.set(title=f"{name}, {resolution}", xticks=[])
                if values.ndim == 1:
                    axis.plot(values.numpy())
                    axis.set(ylim=(smallest, largest) if like_truth and smallest < largest else None)
                    continue
                image = axis.imshow(values.numpy(), **({"vmin": smallest, "vmax": largest} if like_truth else {}))
                axis.set(yticks=[])
                axis.figure.colorbar(image, ax=axis, shrink=0.8)
