"""Tests that random programs find faults planted in the offloader, one at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from program_search import check, look
from program_strategy import FEATURES, Program
from torch import Tensor

from hf_memopt import autograd_state
from hf_memopt.activations import offloaded_pass, saved_tensor_hooks
from hf_memopt.activations.recompute import op_tracer
from hf_memopt.activations.saved_tensors import shown_elements, storages

pytestmark = pytest.mark.e2e

Put = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """A fault, found within `num_programs` by hypothesis 6.170; other versions draw other programs.

    Fewer `features` find the fault sooner, and find no other error. Only a failure that `says` the text counts.
    """

    put: Put
    num_programs: int
    features: tuple[str, ...] = ()
    says: str = ""


def views_have_no_offset(patch: pytest.MonkeyPatch) -> None:
    """Plant: all views begin at the start of their storage."""
    sound = autograd_state.ViewMeta.__init__

    def init(self: Any, tensor: Tensor) -> None:
        sound(self, tensor)
        self._offset = 0

    patch.setattr(autograd_state.ViewMeta, "__init__", init)


def views_have_no_strides(patch: pytest.MonkeyPatch) -> None:
    """Plant: all views are contiguous."""
    sound = autograd_state.ViewMeta.__init__

    def init(self: Any, tensor: Tensor) -> None:
        sound(self, tensor)
        if tensor.dim() == 2 and 0 not in tensor.stride():
            self._stride = (tensor.shape[1], 1)

    patch.setattr(autograd_state.ViewMeta, "__init__", init)


def one_copy_serves_all_versions(patch: pytest.MonkeyPatch) -> None:
    """Plant: a copy from before an in-place modification also serves saves after the modification."""
    patch.setattr(autograd_state.VersionGuard, "covers", lambda self, tensor: True)


def modifications_go_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """Plant: no check of versions, which autograd makes itself only without hooks."""
    patch.setattr(autograd_state.VersionGuard, "check", lambda self: None)


def nobody_waits_for_what_comes_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(storages.OffloadedStorage, "_arrive", lambda self: self._memory)


def double_backward_reads_zeros(patch: pytest.MonkeyPatch) -> None:
    """Plant: all bytes are zero when they are fetched in a backward that makes a graph."""
    sound = storages.LiveStorage.fetch

    def fetch(self: Any, backward: int, is_first: bool) -> Tensor:
        bytes_ = sound(self, backward, is_first)
        return torch.zeros_like(bytes_) if torch.is_grad_enabled() else bytes_

    patch.setattr(storages.LiveStorage, "fetch", fetch)


def a_copy_serves_what_nobody_had_shown(patch: pytest.MonkeyPatch) -> None:
    """Plant: a storage is copied at its first save, and parts that `.data` writes later come from the copy."""
    patch.setattr(shown_elements.ShownElements, "include_all_of", lambda self, tensor: True)
    patch.setattr(shown_elements.ShownElements, "include", lambda self, part: True)
    patch.setattr(offloaded_pass, "is_whole", lambda tensor, num_bytes: True)


def restored_views_count_for_themselves(patch: pytest.MonkeyPatch) -> None:
    """Plant: a backward overwrites a saved tensor unnoticed by other nodes that have saved the same tensor."""
    patch.setattr(autograd_state.VersionGuard, "counted_together", lambda self, tensor: tensor)


def custom_functions_are_like_others(patch: pytest.MonkeyPatch) -> None:
    """Plant: tensors are recomputed from a tensor that a custom function has saved, and overwrites."""
    patch.setattr(saved_tensor_hooks, "called_from_function", lambda frame: False)


def sources_are_the_models_own(patch: pytest.MonkeyPatch) -> None:
    """Plant: plans apply by number, also in passes that differ, and recompute from tensors that the model modifies."""
    patch.setattr(offloaded_pass, "OwnCopy", storages.KeptStorage)
    patch.setattr(offloaded_pass.OffloadedPass, "_is_as_recorded", lambda self, index, found: found is not None)


def writes_through_data_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Plant: a tensor is recomputed from a tensor that was overwritten before the save."""
    patch.setattr(op_tracer.OpTracer, "num_writes", lambda self, key: 0)


def sources_may_be_written_to(patch: pytest.MonkeyPatch) -> None:
    """Plant: a tensor is recomputed from the model's own memory, other parts of which are saved and not yet copied."""

    def has_own_bytes_of(self: storages.LiveStorage, tensor: Tensor) -> bool:
        return not self.is_kept and self.covers(tensor)

    patch.setattr(storages.LiveStorage, "has_own_bytes_of", has_own_bytes_of)


def memory_begins_where_its_storage_does(patch: pytest.MonkeyPatch) -> None:
    """Plant: the offset of a copier's slice is ignored."""

    def of(self: Any, memory: Tensor) -> Tensor:
        return memory.view(self._dtype).as_strided(self._size, self._stride, self._offset)

    patch.setattr(autograd_state.ViewMeta, "of", of)


FAULTS = {
    fault.put.__name__: fault
    for fault in (
        Fault(views_have_no_offset, 56),
        Fault(views_have_no_strides, 2),
        Fault(one_copy_serves_all_versions, 68, ("in place",), "; plain in pass"),
        Fault(modifications_go_unnoticed, 5, ("in place",), "None; plain in pass"),
        Fault(nobody_waits_for_what_comes_back, 3),
        Fault(double_backward_reads_zeros, 5, ("double backward",), "another loss or gradient"),
        Fault(a_copy_serves_what_nobody_had_shown, 11, ("data",), "another loss or gradient"),
        Fault(restored_views_count_for_themselves, 23, ("aten",), "None; plain in pass"),
        Fault(custom_functions_are_like_others, 176, ("data",), "another loss or gradient"),
        Fault(sources_are_the_models_own, 170, ("in place", "other bodies")),
        Fault(writes_through_data_are_not_counted, 164, ("data",), "another loss or gradient"),
        Fault(sources_may_be_written_to, 46, ("data",), "another loss or gradient"),
        Fault(memory_begins_where_its_storage_does, 3, ("slices",), "another loss or gradient"),
    )
}


def _param(fault: Fault) -> Any:
    return pytest.param(fault.put.__name__, marks=[pytest.mark.slow] * (fault.num_programs > 100))


@pytest.mark.parametrize("name", [_param(fault) for fault in FAULTS.values()])
@pytest.mark.sweep(share=0.25)
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

    found = look(2 * fault.num_programs + 100, seed=0, without=without, check=check_for_it, shrinks=False)
    assert found.program is not None


def test_nothing_is_found_in_a_sound_offloader() -> None:
    found = look(60, seed=0, without=frozenset(FEATURES), shrinks=False)
    assert found.program is None, f"{found.program}\n{found.message}"
