"""Steps of a small model with every kind of plan, compared with the plain run: to the bit, or the same error."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from adversarial_copier import COPIERS
from random_plans import RandomPlanner
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.activations import pass_planner, plan_maker

# Of one step, given its number; it makes its own context and runs its own backward.
Context = Callable[[nn.Module], AbstractContextManager[Any]]
Step = Callable[[nn.Module, Context, int], Any]
NUM_STEPS = 6
# The last four are plans: to keep or to offload the storages that are not recomputed, none, or every second one.
MODES = ("all", "inputs", "keep", "offload", "recompute", "even", "odd", "random")


def plain(model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


class _Planner(RandomPlanner):
    """Decides the same for every storage where it can."""

    wanted: str = "random"
    _number: int = 0

    def _action(self, storage: Any) -> pass_planner.Action:
        if self.wanted == "random":
            return super()._action(storage)
        self._number += 1
        again = self.wanted == "recompute" or self.wanted == ("even", "odd")[self._number % 2]
        if again and storage.recompute_s is not None:
            return pass_planner.Action.RECOMPUTE
        return pass_planner.Action.OFFLOAD if self.wanted in ("offload", "recompute") else pass_planner.Action.KEEP


@contextmanager
def planned(mode: str) -> Iterator[_Planner]:
    planner = _Planner(random.Random(0))
    planner.wanted = mode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_maker, "make_plan", planner)
        yield planner


def results(step: Step, model: nn.Module, context: Context, num_steps: int = NUM_STEPS) -> list[Any]:
    """Return gradients and each step's results; an error's message is the last."""
    torch.manual_seed(0)
    model = copy.deepcopy(model)
    found: list[Any] = []
    for number in range(num_steps):
        try:
            returned = step(model, context, number)
        except RuntimeError as error:
            found.append("modified" if "modified by an inplace operation" in str(error) else str(error))
            break
        found.append((returned, [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
    return found


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def assert_as_plain(
    step: Step, model: nn.Module, mode: str, copier: str = "late", **options: Any
) -> ActivationOffloader:
    """Compare one mode with the plain run, with a copier that is as late as it may be."""
    want = results(step, model, plain)
    options["mode"] = mode if mode in ("all", "inputs") else "auto"
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=COPIERS[copier](), **options)
    with planned(mode):
        found = results(step, model, offloader.offload_context)
    assert same(found, want), f"mode {mode}: {[type(entry).__name__ for entry in found]}, {found[-1]}"
    return offloader
