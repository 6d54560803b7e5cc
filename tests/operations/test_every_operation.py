"""torch's databases of operators and modules: in every mode each gives, offloaded, the bits that it gives plainly."""

import random
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from cases import DTYPES, Case, module_cases, module_names, operator_cases, operator_names
from chosen import ALWAYS_MODULES, ALWAYS_OPERATORS, MODULES, OPERATORS, SEED, chosen
from obstacles import MODULE_OBSTACLES, OPERATOR_OBSTACLES, faults_of
from variants import try_everything

# What torch says of its own samples, deprecated ones among them.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SAMPLES = 3


@pytest.mark.parametrize("name", chosen(OPERATORS, ALWAYS_OPERATORS), ids=lambda name: f"{name}-seed{SEED}")
def test_an_operator(name: str) -> None:
    assert not faults(one_for_each_dtype(operator_cases, name), OPERATOR_OBSTACLES.get(name, ()), is_whole=False)


@pytest.mark.parametrize("name", chosen(MODULES, ALWAYS_MODULES), ids=lambda name: f"{name}-seed{SEED}")
def test_a_module(name: str) -> None:
    assert not faults(one_for_each_dtype(module_cases, name), MODULE_OBSTACLES.get(name, ()), is_whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_in_whole(name: str) -> None:
    assert not faults(operator_cases(name, NUM_SAMPLES), OPERATOR_OBSTACLES.get(name, ()), is_whole=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_module_in_whole(name: str) -> None:
    assert not faults(module_cases(name, NUM_SAMPLES), MODULE_OBSTACLES.get(name, ()), is_whole=True)


@pytest.mark.canary
def test_the_lists_of_names_are_complete() -> None:
    """Another release of torch has others; correct operators.txt and modules.txt."""
    assert set(OPERATORS) ^ set(operator_names()) == set()
    assert set(MODULES) ^ set(module_names()) == set()


def test_obstacles_are_of_operators_and_modules() -> None:
    assert set(OPERATOR_OBSTACLES) <= set(OPERATORS)
    assert set(MODULE_OBSTACLES) <= set(MODULES)


def faults(cases: Iterable[Case], known: tuple[str, ...], *, is_whole: bool) -> list[str]:
    # All copiers on float32, one of them on others, which differ in arithmetic rather than in what is saved when.
    outcomes = [
        try_everything(case, all_copiers=is_whole and all(leaf.dtype is torch.float32 for leaf in case.leaves))
        for case in cases
    ]
    return faults_of(outcomes, known, is_whole=is_whole)


def one_for_each_dtype(make: Callable[..., Iterator[Case]], name: str) -> Iterator[Case]:
    """One case in float32, by lot, and one in another dtype."""
    lots = random.Random(f"{SEED} {name}")
    for dtype in (torch.float32, lots.choice(DTYPES[1:])):
        cases = list(make(name, 4, (dtype,)))
        if cases:
            yield lots.choice(cases)
