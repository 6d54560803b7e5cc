"""One registration per type of device: what is known without one, and what a registered one changes while it lasts."""

import pytest
import torch

from hf_memopt.transfer import SyncCopier, clock_for, copier_for
from hf_memopt.transfer.clock import HostClock
from hf_memopt.transfer.device_types import PLAIN_TYPES, DeviceType, device_type, readable_in_place, registered

CPU = torch.device("cpu")


class Special(torch.Tensor):
    """A subclass that a registration declares to be plain."""


def test_the_cpu_copies_at_once_and_cannot_run_out() -> None:
    assert isinstance(copier_for("cpu"), SyncCopier)
    assert isinstance(clock_for("cpu"), HostClock)
    assert device_type(CPU).is_unlimited


def test_what_is_not_registered_is_an_accelerator_with_streams() -> None:
    assert not device_type(torch.device("cuda")).is_unlimited
    assert device_type(torch.device("cuda")) is device_type(torch.device("xpu"))


def test_a_registration_lasts_as_long_as_its_context() -> None:
    before, purposes, copier = device_type(CPU), [], SyncCopier()

    def make_copier(device: torch.device, pin_memory: bool, purpose: str) -> SyncCopier:
        purposes.append((device.type, pin_memory, purpose))
        return copier

    with registered("cpu", DeviceType(make_copier, tensor_class=Special)):
        assert copier_for("cpu") is copier_for(CPU, pin_memory=False, purpose="teacher") is copier
        assert Special in PLAIN_TYPES
    assert purposes == [("cpu", True, "activations"), ("cpu", False, "teacher")]
    assert device_type(CPU) is before
    assert {torch.Tensor} == PLAIN_TYPES


def test_memory_is_mapped_by_the_device_that_reads_it_and_not_at_home() -> None:
    memory, mapped = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    assert readable_in_place(memory, CPU) is memory
    with registered("meta", DeviceType(map_host=lambda given, device: mapped)):
        assert readable_in_place(memory, torch.device("meta")) is mapped
    with pytest.raises(ValueError, match="page-locked memory on CUDA"):
        readable_in_place(memory, torch.device("meta"))
