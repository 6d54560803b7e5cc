"""Published step times: the halves of the fit, and deviations of predictions."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmarks.common import RESULTS_FOLDER
from benchmarks.published.cards import card_of
from benchmarks.published.measurements import Measurement, measurements
from hf_memopt.planning.cards.gpus import family_of

RESULTS = RESULTS_FOLDER / "step-times.json"
MARKS = ("<!-- python -m benchmarks.published.fit writes this -->", "<!-- up to here: times -->")
# Settings in which two runs on the same samples may differ.
METHODS = ("attention", "base", "checkpointing", "precision", "dtype", "tf32", "optimizer", "lora_rank")
_SAME = ("source", "gpu", "model", "task", "seq_len")
# Smaller differences are noise: repeated measurements on the T4 differ by up to 11 %.
_NOISE = 0.05
_MISS = 0.25


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


def halves(rows: list[Measurement]) -> dict[str, int]:
    """Return the half of each row, 0 or 1, without rows whose device is not known well enough.

    In each family of cards, models in alphabetical order alternate between the halves, with all their rows. So on cards
    of one family no model is in both halves.
    """
    known = [row for row in rows if not row.time_unknown]
    models = {of: sorted({row.model for row in known if family(row) == of}) for of in map(family, known)}
    return {row.name: models[family(row)].index(row.model) % 2 for row in known}


def deviations(predicted: dict[str, float], *, of: str | None = None, half: int | None = None) -> list[float]:
    rows = timed()
    in_half = halves(rows)
    return [
        predicted[row.name] / row.step_s - 1
        for row in rows
        if row.step_s and row.name in in_half and half in (None, in_half[row.name]) and of in (None, family(row))
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
    return "\n".join([*_families(predicted), "", *_misses(predicted), "", *_signs(predicted)])


def _families(predicted: dict[str, float]) -> Iterator[str]:
    known = [row for row in timed() if not row.time_unknown]
    yield "| cards | steps | of models | median deviation | from | to |"
    yield "|---|---|---|---|---|---|"
    for of in [*sorted(set(map(family, known))), None]:
        found = deviations(predicted, of=of)
        models = {row.model for row in known if of in (None, family(row))}
        cells = [of or "all", str(len(found)), str(len(models)), f"{_size(found):.1%}"]
        yield f"| {' | '.join([*cells, f'{min(found):+.0%}', f'{max(found):+.0%}'])} |"
    yield ""
    first, second = (_size(deviations(predicted, half=half)) for half in (0, 1))
    yield f"The first half by a fit to the second: {first:.1%}; the second by a fit to the first: {second:.1%}."


def _misses(predicted: dict[str, float]) -> Iterator[str]:
    in_half = halves(timed())
    missed: dict[str, list[tuple[float, str]]] = {}
    for row in timed():
        if row.step_s and row.name in in_half and abs(predicted[row.name] / row.step_s - 1) > _MISS:
            text = f"{row.id}: {row.step_s:.3g}, {predicted[row.name]:.3g}"
            of_card = missed.setdefault(f"{row.source} ({row.gpu})", [])
            of_card.append((abs(math.log(predicted[row.name] / row.step_s)), text))
    yield f"Off by more than {_MISS:.0%}, with the worst of each source and card, in seconds measured and predicted:"
    yield ""
    for name, found in missed.items():
        yield f"- {len(found)} of {name}; {max(found)[1]}"


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
