"""`evaluation.json`: the figures of `hf-memopt evaluate`, which `export` writes into the model card."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from hf_memopt.lerobot.evaluate.evaluation_table import Rollouts, draw
from hf_memopt.lerobot.evaluate.measure import ModelEvaluation, ReflowEvaluation
from hf_memopt.lerobot.files.checkpoint_files import read_object
from hf_memopt.lerobot.files.policy_files import resolve_checkpoint, weights_digest
from hf_memopt.lerobot.student.model_card import Measured, Observations
from hf_memopt.report.figures import render

EVALUATION_FILE = "evaluation.json"
# JSON has no numbers as keys.
_BY_STEPS = ("error", "action_error", "spread", "latency_ms", "success_rate")


def write_evaluation(folder: Path, policy: str, measured: Measured, rollouts: Rollouts | None = None) -> list[Path]:
    """Write `evaluation.json` and `evaluation.png`, over older ones. ValueError without matplotlib."""
    evaluation, observations = measured
    folder.mkdir(parents=True, exist_ok=True)
    numbers, figure = folder / EVALUATION_FILE, folder / "evaluation.png"
    found: dict[str, Any] = {
        "weights_sha256": weights_digest(resolve_checkpoint(policy)),
        "observations": dataclasses.asdict(observations),
        **evaluation.to_dict(),
    }
    if rollouts:
        found["environment"] = {steps: dataclasses.asdict(result) for steps, result in rollouts.items()}
    numbers.write_text(json.dumps(found, indent=2, default=str))
    figure.write_bytes(render(lambda empty: draw(empty, evaluation), dark=False))
    return [numbers, figure]


def read_evaluation(folder: Path, policy: str) -> Measured:
    """Read what `write_evaluation` wrote; ValueError if it cannot be read, or was measured with other weights."""
    file = folder / EVALUATION_FILE
    if not file.is_file():
        raise ValueError(f"evaluation={str(folder)!r} holds no {EVALUATION_FILE}; name the --output of `evaluate`")
    found = read_object(file)
    if found.get("weights_sha256") != weights_digest(resolve_checkpoint(policy)):
        raise ValueError(
            f"evaluation={str(folder)!r} was measured with other weights than {policy} has; run `evaluate` again"
        )
    try:
        root = found["observations"]["root"]
        observations = Observations(**{**found["observations"], "root": None if root is None else Path(root)})
        sides = {name: _model(found[name]) for name in ("teacher", "student")}
        evaluation = ReflowEvaluation(found["num_observations"], found["teacher_num_steps"], found["device"], **sides)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not what `hf-memopt evaluate` writes ({error!r}); run it again") from error
    return evaluation, observations


def _model(found: dict[str, Any]) -> ModelEvaluation:
    by_steps = {name: {int(steps): value for steps, value in found[name].items()} for name in _BY_STEPS}
    return ModelEvaluation(**{**found, **by_steps})
