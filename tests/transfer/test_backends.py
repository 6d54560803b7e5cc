"""Tests of devices without a backend's registration, and of the changes that a registration makes while it lasts."""

import pytest
import torch

from hf_memopt.autograd_state import PLAIN_TYPES
from hf_memopt.transfer import SyncCopier, clock_for, copier_for
from hf_memopt.transfer.backends import DeviceBackend, backend_of, readable_in_place, registered
from hf_memopt.transfer.clock import HostClock

CPU = torch.device("cpu")


class Special(torch.Tensor):
    """A subclass that a registration declares to be plain."""


def test_the_cpu_copies_at_once_and_cannot_run_out() -> None:
    assert isinstance(copier_for("cpu"), SyncCopier)
    assert isinstance(clock_for("cpu"), HostClock)
    assert backend_of(CPU).is_unlimited


def test_what_is_not_registered_is_an_accelerator_with_streams() -> None:
    assert not backend_of(torch.device("cuda")).is_unlimited
    assert backend_of(torch.device("cuda")) is backend_of(torch.device("xpu"))


def test_a_registration_lasts_as_long_as_its_context() -> None:
    before, purposes, copier = backend_of(CPU), [], SyncCopier()

    def make_copier(device: torch.device, pin_memory: bool, purpose: str) -> SyncCopier:
        purposes.append((device.type, pin_memory, purpose))
        return copier

    with registered("cpu", DeviceBackend(make_copier, tensor_class=Special)):
        assert copier_for("cpu") is copier_for(CPU, pin_memory=False, purpose="teacher") is copier
        assert Special in PLAIN_TYPES
    assert purposes == [("cpu", True, "activations"), ("cpu", False, "teacher")]
    assert backend_of(CPU) is before
    assert {torch.Tensor} == PLAIN_TYPES


def test_memory_is_mapped_by_the_device_that_reads_it_and_not_at_home() -> None:
    memory, mapped = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    assert readable_in_place(memory, CPU) is memory
    with registered("meta", DeviceBackend(map_host=lambda given, device: mapped)):
        assert readable_in_place(memory, torch.device("meta")) is mapped
    with pytest.raises(ValueError, match="page-locked memory on CUDA"):
        readable_in_place(memory, torch.device("meta"))
