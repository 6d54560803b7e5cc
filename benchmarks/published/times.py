"""Published step times, and deviations of predictions."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmarks.common import RESULTS_FOLDER
from benchmarks.published.cards import card_of
from benchmarks.published.measurements import Measurement, measurements
from hf_memopt.planning.cards.gpus import family_of, time_range

# Predictions by fits to the steps of other models, which docs/LOG.md describes.
RESULTS = RESULTS_FOLDER / "step-times.json"
# Settings in which two runs on the same samples may differ.
METHODS = ("attention", "base", "is_prepared", "checkpointing", "precision", "dtype", "tf32", "optimizer", "lora_rank")
_SAME = ("source", "gpu", "model", "task", "seq_len")
# Smaller differences are noise: repeated measurements on the T4 differ by up to 11 %.
_NOISE = 0.05


class Pair(NamedTuple):
    """Two methods of training on the same samples, with the second one's time over that of the first."""

    name: str  # card, model, batch and the two methods
    measured: float
    predicted: float

    @property
    def is_right(self) -> bool:
        return (self.measured > 1) == (self.predicted > 1)


def timed() -> list[Measurement]:
    """Return the rows with a time, a simulation and a card of known figures."""
    return [row for row in measurements() if row.step_s and not row.not_simulated and card_of(row.gpu)]


def family(row: Measurement) -> str:
    card = card_of(row.gpu)
    assert card is not None
    return family_of(card) or row.gpu


def unseen() -> dict[str, float]:
    """Return the seconds of each step, predicted by a fit to steps of other models on cards of its family."""
    found: dict[str, float] = json.loads(RESULTS.read_text())["unseen_step_s"]
    return found


def deviations(predicted: dict[str, float], *, of: str | None = None, is_lora: bool | None = None) -> list[float]:
    """Return relative deviations of predictions for steps whose device is known well enough."""
    return [
        predicted[row.name] / row.step_s - 1
        for row in timed()
        if row.step_s
        and not row.time_unknown
        and of in (None, family(row))
        and is_lora in (None, row.lora_rank is not None)
    ]


def pairs(predicted: dict[str, float]) -> list[Pair]:
    """Return all pairs of methods on the same samples, of one source, card and model.

    Repeated measurements count by their median. Pairs with nearly the same time are left out.
    """
    ways: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Measurement]]] = {}
    for row in timed():
        facts = asdict(row)
        same = (*(facts[name] for name in _SAME), row.batch_size * row.accumulation)
        way = (*(facts[name] for name in METHODS), row.accumulation, tuple(row.lora_targets))
        ways.setdefault(same, {}).setdefault(way, []).append(row)
    found = []
    for same, group in ways.items():
        ordered = sorted(group.values(), key=lambda rows: rows[0].name)
        for position, first in enumerate(ordered):
            for second in ordered[position + 1 :]:
                measured = _median(second) / _median(first)
                if abs(measured - 1) >= _NOISE:
                    name = f"{same[1]}, {same[2]}, {same[5]} x {same[4]}: {_way(second[0])} over {_way(first[0])}"
                    found.append(Pair(name, measured, predicted[second[0].name] / predicted[first[0].name]))
    return found


def report(predicted: dict[str, float]) -> str:
    return "\n".join([*_families(predicted), "", *_signs(predicted)])


def _families(predicted: dict[str, float]) -> Iterator[str]:
    known = [row for row in timed() if not row.time_unknown]
    yield "| cards | steps | of models | median deviation | of them with adapters | median deviation | printed range |"
    yield "|---|---|---|---|---|---|---|"
    for of in [*sorted(set(map(family, known))), None]:
        rows = [row for row in known if of in (None, family(row))]
        cells = [of or "all", str(len(rows)), str(len({row.model for row in rows}))]
        found, adapted = deviations(predicted, of=of), deviations(predicted, of=of, is_lora=True)
        cells += [f"{_size(found):.1%}", str(len(adapted)), f"{_size(adapted):.1%}" if adapted else ""]
        printed = time_range(card_of(rows[0].gpu)) if of else None
        yield f"| {' | '.join([*cells, f'{printed.low} to {printed.high}' if printed else ''])} |"


def _signs(predicted: dict[str, float]) -> Iterator[str]:
    found = pairs(predicted)
    wrong = [pair for pair in found if not pair.is_right]
    yield f"Of {len(found)} pairs of methods on one card, {len(found) - len(wrong)} have the right sign. Wrong ones:"
    yield ""
    for pair in wrong:
        yield f"- {pair.name}: {pair.measured:.2f} measured, {pair.predicted:.2f} predicted"


def _size(shares: list[float]) -> float:
    return statistics.median(map(abs, shares))


def _median(rows: list[Measurement]) -> float:
    return statistics.median(row.step_s for row in rows if row.step_s)


def _way(row: Measurement) -> str:
    weights = row.base or {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[row.dtype]
    amp = "" if row.precision == "no" else f" with {row.precision}"
    tf32 = " in TF32" if row.tf32 else ""
    adapters = "" if row.lora_rank is None else f", LoRA {row.lora_rank} of {len(row.lora_targets)}"
    rest = [", checkpointed"] * row.checkpointing + [f", accumulated {row.accumulation}"] * (row.accumulation > 1)
    return f"{weights}{amp}{tf32}, {row.attention}, {row.optimizer}{adapters}{''.join(rest)}"
