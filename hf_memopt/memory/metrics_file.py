"""Memory figures of a run, one JSON object per logged step: `{"step": 40, "memory/allocated_gib": 3.1, ...}`."""

import json
from collections.abc import Mapping
from pathlib import Path

from hf_memopt.ranges import COUNT_OR_ZERO

METRICS_FILE = "memory.jsonl"


def append_metrics(file: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Add one line; the folder is made if it is missing. In a distributed run one rank should call this.

    Args:
        file: `memory.jsonl` of the run's folder, so that `hf-memopt report` finds it.
        step: number of optimizer steps so far.
        metrics: figures by name.

    Raises:
        ValueError: `step` is no count, or a metric is called `step`.
    """
    COUNT_OR_ZERO.check("step", step)
    if "step" in metrics:
        raise ValueError(f"metrics have a key 'step' ({metrics['step']}), which is the step's own; rename it")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"step": step, **metrics}) + "\n")


def read_metrics(file: Path) -> list[dict[str, float]]:
    """Return all lines by step, of a step logged again the later one; a ValueError for one without a step."""
    by_step = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            by_step[int(record["step"])] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}, line {number}, is not a JSON object with a 'step': {line[:60]!r}; remove it"
            ) from error
    return [by_step[step] for step in sorted(by_step)]
