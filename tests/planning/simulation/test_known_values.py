"""Knowledge of written values, and of values computed from them."""

from collections.abc import Callable

import pytest
import torch
from simulated import simulated
from torch import Tensor

from hf_memopt.planning.simulation.known_values import value_of

IDS = [[7, 7, 1, 2], [3, 7, 4, 5]]

QUESTIONS: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda ids: int((ids == 7).sum()),
    "a truth value": lambda ids: bool((ids != 0).all()),
    "a list": lambda ids: (ids + 1).tolist(),
    "a comparison": lambda ids: torch.equal(ids, ids.clone()),
    "a selection": lambda ids: ids[ids == 7].shape,
    "values of a selection": lambda ids: ids[ids > 3].tolist(),
    "elements that are repeated": lambda ids: (
        torch.ones(2, 4, 6, device=ids.device)[(ids == 7).unsqueeze(-1).expand(2, 4, 6)].shape
    ),
    "a masked selection": lambda ids: torch.ones(2, 4, device=ids.device).masked_select(ids == 7).shape,
    "positions": lambda ids: ids.nonzero().shape,
    "runs of equal numbers": lambda ids: torch.unique_consecutive(ids).tolist(),
    "numbers of repeats": lambda ids: torch.repeat_interleave(ids[0]).shape,
    "what is written to a view": lambda ids: (ids[0].fill_(9), ids.tolist())[1],
    "copies": lambda ids: ids.cpu().to(torch.int32)[:, 1:].tolist(),
    "made on the host": lambda ids: torch.ones(7, dtype=torch.long, device="cpu")[2:].tolist(),
    "a range": lambda ids: torch.arange(7, device=ids.device)[2:].tolist(),
}


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.sweep(share=0.25)
def test_answers_are_those_of_a_real_run(name: str) -> None:
    def ask(device: torch.device) -> object:
        return QUESTIONS[name](torch.tensor(IDS, device=device))

    assert str(simulated(ask)) == str(ask(torch.device("cpu")))


@pytest.mark.parametrize(
    "unknown",
    [
        lambda ids: torch.zeros_like(torch.rand(2, 4, device=ids.device), dtype=torch.long),
        lambda ids: ids.add_(torch.randint(9, (2, 4), device=ids.device)),
        lambda ids: (ids[0].random_(3), ids)[1],
        lambda ids: ids * torch.rand(2, 4, device=ids.device),
        lambda ids: torch.randint(3, (2, 4), device=ids.device),
        lambda ids: torch.zeros(2, 4, dtype=torch.long, device=ids.device),  # which stand for data
        lambda ids: torch.histc(ids.int(), 3),  # which the CPU lacks
        lambda ids: torch.tensor([0.5], device=ids.device),
        lambda ids: ids.new_zeros(0, dtype=torch.uint8).set_(ids.untyped_storage()),
        lambda ids: ids[:, :1, None].expand(2, 2**10, 2**13) + ids[:, :1, None],
    ],
)
def test_what_follows_from_anything_else_is_unknown(unknown: Callable[[Tensor], Tensor]) -> None:
    def ask(device: torch.device) -> tuple[bool, bool]:
        ids = torch.tensor(IDS, device=device)
        known = value_of(ids) is not None
        return known, value_of(unknown(ids)) is None

    assert simulated(ask) == (True, True)
