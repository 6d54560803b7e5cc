"""The random programs would notice: faults that are put into the offloader, one at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from program_search import check, look
from program_strategy import FEATURES, Program
from torch import Tensor

from hf_memopt import autograd_state
from hf_memopt.activations.saved_tensors import storages

Put = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """What is put in, and how many programs of which features find it.

    `features` are those that the programs may use. The fewer, the sooner it is found, and nothing else is. `says` is
    a part of what is wrong then; other failures do not count.
    """

    put: Put
    num_programs: int
    features: tuple[str, ...] = ()
    says: str = ""


def views_have_no_offset(patch: pytest.MonkeyPatch) -> None:
    """All views begin where their storage does."""
    sound = autograd_state.ViewMeta.__init__

    def init(self: Any, tensor: Tensor) -> None:
        sound(self, tensor)
        self._offset = 0

    patch.setattr(autograd_state.ViewMeta, "__init__", init)


def views_have_no_strides(patch: pytest.MonkeyPatch) -> None:
    """All views are contiguous."""
    sound = autograd_state.ViewMeta.__init__

    def init(self: Any, tensor: Tensor) -> None:
        sound(self, tensor)
        if tensor.dim() == 2 and 0 not in tensor.stride():
            self._stride = (tensor.shape[1], 1)

    patch.setattr(autograd_state.ViewMeta, "__init__", init)


def one_copy_serves_all_versions(patch: pytest.MonkeyPatch) -> None:
    """What was saved before an in-place modification is taken for what is saved after it."""
    patch.setattr(autograd_state.VersionGuard, "covers", lambda self, tensor: True)


def modifications_go_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """Autograd's own check, which hooks switch off, is not made."""
    patch.setattr(autograd_state.VersionGuard, "check", lambda self: None)


def nobody_waits_for_what_comes_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(storages.OffloadedStorage, "_arrive", lambda self: self._memory)


def double_backward_reads_zeros(patch: pytest.MonkeyPatch) -> None:
    """All bytes are zero when they are fetched while a graph of the backward is made."""
    sound = storages.LiveStorage.fetch

    def fetch(self: Any, backward: int, is_first: bool) -> Tensor:
        bytes_ = sound(self, backward, is_first)
        return torch.zeros_like(bytes_) if torch.is_grad_enabled() else bytes_

    patch.setattr(storages.LiveStorage, "fetch", fetch)


FAULTS = {
    fault.put.__name__: fault
    for fault in (
        Fault(views_have_no_offset, 60),
        Fault(views_have_no_strides, 60),
        Fault(one_copy_serves_all_versions, 200, ("in place",), "; plain in pass"),
        Fault(modifications_go_unnoticed, 200, ("in place",), "None; plain in pass"),
        Fault(nobody_waits_for_what_comes_back, 40),
        Fault(double_backward_reads_zeros, 100, ("double backward",), "another loss or gradient"),
    )
}


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.put(monkeypatch)
    without = frozenset(FEATURES).difference(fault.features)

    def check_for_it(program: Program) -> None:
        try:
            check(program)
        except AssertionError as error:
            if fault.says in str(error):
                raise

    assert look(fault.num_programs, seed=0, without=without, check=check_for_it, shrinks=False).program is not None


def test_nothing_is_found_in_a_sound_offloader() -> None:
    found = look(60, seed=0, without=frozenset(FEATURES), shrinks=False)
    assert found.program is None, f"{found.program}\n{found.message}"
