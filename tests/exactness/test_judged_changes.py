"""No innocent change of a training step is a fault to `verify`, and no fault that people reported is rounding."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from judged_changes import FAULTS, INNOCENT, PRECISIONS, PRECISIONS_OF, judged, precisions_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*force disabled by torch.compiler.config"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # Inductor's imports call it
]
CAUSES = {
    "loss times 126/127": "the loss is 0.992126 times the plain one",
    "loss times 0.97": "the loss is 0.97 times the plain one",
    "label smoothing 0.01": "the forward pass or the loss differs",
    "auxiliary loss dropped": "less each time: a term that one run lacks",
    "one label of 126 lost": "the runs see different data",
    "clipping before accumulation ends": "it was clipped, scaled or zeroed before accumulation ended",
    "clipping at another norm": "the optimizer got 1.04 times the plain gradient: clipping",
    "weight decay on norms": "weight_decay is 0.01 instead of 0:",
    "weight decay on norms, by hand": "is added to the update: weight decay",
    "weight decay dropped": "weight_decay is 0 instead of 0.01:",
    "schedule at double speed": "the learning rate or its schedule",
    "first micro-batch lost in one weight": "it was clipped, scaled or zeroed before accumulation ended",
    "optimizer state in bfloat16": "gradients are equal and the update is not",
    "a stale activation": "a stale copy",
    "dropout drawn again": "masks were drawn again",
    "tied weights untied": "the switched run trains lm_head.weight too: weights that are tied",
    "frequencies in bfloat16": "rounded to a lower precision",
    "an inner autocast ignored in backward": "an autocast region that one run leaves out",
}
SLOW = ("inductor", "TF32", "four micro-batches", "loss by logsumexp", "eager experts")


def cases(names: Iterable[str]) -> list[Any]:
    """Return names and precisions; in bfloat16, where faults hide best, they are quick."""
    return [
        pytest.param(name, each, marks=pytest.mark.slow if name in SLOW or (each != quick) else ())
        for name in names
        for quick in [precisions_of(name)[0] if name in PRECISIONS_OF else "bfloat16"]
        for each in precisions_of(name)
    ]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "precision"), cases(INNOCENT))
@pytest.mark.sweep(share=0.25)
def test_an_innocent_change_is_rounding(name: str, precision: str) -> None:
    report = judged(INNOCENT[name], PRECISIONS[precision])
    assert report.verdict in ("equal", "rounding"), report
    assert report.worst is None or report.worst.excess < 0.9


@pytest.mark.parametrize(("name", "precision"), cases(FAULTS))
@pytest.mark.sweep(share=0.08)
def test_a_fault_is_none(name: str, precision: str) -> None:
    report = judged(FAULTS[name], PRECISIONS[precision])
    assert report.verdict in ("small", "different"), report
    assert CAUSES.get(name, "") in report.advice
    assert len(report.runs) <= 5


def test_factors_of_gradients_in_bfloat16_without_autocast_are_found() -> None:
    make, *steps = FAULTS["label smoothing 0.01"]
    report = judged((lambda: make().bfloat16(), *steps), None)
    assert report.verdict == "small", report
    assert "times the plain ones, on the whole: how losses are divided" in report.advice
