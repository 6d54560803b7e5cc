"""Likely values: where they come from, how far they are followed, and how they are told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from estimate_runs import State, mlp_setup, step
from simulated import simulated
from torch import Tensor

from hf_memopt.planning.estimate import estimate_peak_memory

NUM_TOKENS, NUM_EXPERTS = 10, 4
CHOICES = [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3]]


def scores(device: torch.device) -> Tensor:
    return torch.rand(NUM_TOKENS, NUM_EXPERTS, device=device)


def loads_of_a_loop(scores: Tensor) -> list[int]:
    """Return how many tokens each expert gets, found as models do that run their experts one by one."""
    mask = torch.nn.functional.one_hot(scores.topk(2).indices, NUM_EXPERTS).permute(2, 1, 0)
    hit = mask.sum(dim=(-1, -2)).gt(0).nonzero().squeeze(-1)
    return [len(torch.where(mask[int(expert)])[1]) for expert in hit]


ANSWERS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "choices": (lambda scores: scores.topk(2).indices.tolist(), CHOICES),
    "tokens of experts that run one by one": (loads_of_a_loop, [5, 5, 5, 5]),
    "the best choice": (lambda scores: scores.max(dim=1).indices[:5].tolist(), [0, 1, 2, 3, 0]),
    "argmax": (lambda scores: scores.argmax(-1)[:5].tolist(), [0, 1, 2, 3, 0]),
    "counts of choices": (
        lambda scores: torch.bincount(scores.topk(2).indices.flatten(), minlength=NUM_EXPERTS).tolist(),
        [5, 5, 5, 5],
    ),
    "counts of unknown numbers": (
        lambda scores: torch.bincount((scores * 9).long().flatten(), minlength=3).cumsum(0).tolist(),
        [14, 27, 40],
    ),
    "a length from a mask": (lambda scores: torch.arange(int((scores > 0).sum(1).max())).tolist(), [0, 1, 2, 3]),
    "one length of several sequences": (lambda scores: torch.unique_consecutive((scores > 0).sum(1)).tolist(), [4]),
    "numbers that equal another": (lambda scores: (scores == 0).sum(1)[:2].tolist(), [0, 0]),
    "numbers that differ from another": (lambda scores: (scores != 0).sum(1)[:2].tolist(), [4, 4]),
    "samples that are not padding": (
        lambda scores: scores[(scores == 0).sum(dim=1) != NUM_EXPERTS].shape,
        (NUM_TOKENS, NUM_EXPERTS),
    ),
    "parts of unknown sizes": (
        lambda scores: [len(part) for part in scores.split(scores[0].long().tolist())],
        [3, 3, 2, 2],
    ),
    "numbers that are not finite": (lambda scores: int(scores.isnan().sum() + scores.isinf().sum()), 0),
    "what is written to a guess": (lambda scores: int(scores.isnan().logical_or_(torch.tensor(True)).sum()), 40),
    "repeats": (lambda scores: scores.repeat_interleave(scores[:, 0].long(), dim=0).shape[0], NUM_TOKENS),
    "the text of a number": (lambda scores: f"expert_{scores.argmax(-1)[6]:02}", "expert_02"),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.sweep(share=0.25)
def test_answers_are_likely_ones(name: str) -> None:
    ask, expected = ANSWERS[name]
    assert simulated(lambda device: ask(scores(device))) == expected


def step_with(ask: Callable[[Tensor], Any]) -> Callable[[State], None]:
    def asking(state: State) -> None:
        ask(scores(state.inputs[0].device))
        step(state)

    return asking


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tokens of experts that run one by one", "experts get equal shares"),
        ("parts of unknown sizes", "experts get equal shares"),
        ("a length from a mask", "hide nothing"),
        ("numbers that are not finite", "finite"),
        ("repeats", "repeat each element once"),
    ],
)
def test_an_answer_that_rests_on_a_guess_says_so(name: str, words: str) -> None:
    found = estimate_peak_memory(mlp_setup, step_with(ANSWERS[name][0]))
    assert found.confidence == "medium"
    assert any(words in each for each in found.assumptions)


def test_a_guess_that_nobody_asks_for_costs_no_confidence() -> None:
    found = estimate_peak_memory(mlp_setup, step_with(lambda scores: scores.topk(2).indices + 1))
    assert found.confidence == "high"


@pytest.mark.parametrize(
    ("ask", "operation"),
    [
        (lambda scores: scores.view(int(scores[0, 0].long()), -1, 7), "aten.view"),
        (lambda scores: scores[:, : int(scores[0, 0].long())] @ scores.new_zeros(NUM_EXPERTS, 2), "aten.mm"),
        (lambda scores: torch.bincount(scores[0].long()), "aten.bincount"),
    ],
)
def test_an_operation_that_does_not_fit_a_guess_is_named_in_one_line(
    ask: Callable[[Tensor], Any], operation: str
) -> None:
    with pytest.raises(ValueError, match=rf"{operation}.*, in module '.*'") as caught:
        estimate_peak_memory(mlp_setup, step_with(ask))
    assert "\n" not in str(caught.value)
