"""Tests of the link's bandwidth: bytes over the clock's seconds, without the first copy of each direction."""

import torch
from torch import Tensor

from hf_memopt.transfer import SyncCopier, Transfer
from hf_memopt.transfer.clock import HostClock, measure_link

MIB = 2**20


class Link(SyncCopier):
    """A link of 1 GiB/s to the host and 4 GiB/s to the device, with a second more for each direction's first copy."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.sizes: list[int] = []

    def to_host(self, source: Tensor, destination: Tensor) -> Transfer:
        self.now_s += source.nbytes / 2**30 + (self.bytes_to_host == 0)
        self.sizes.append(source.nbytes)
        return super().to_host(source, destination)

    def to_device(self, source: Tensor, destination: Tensor) -> Transfer:
        self.now_s += source.nbytes / 2**32 + (self.bytes_to_device == 0)
        return super().to_device(source, destination)


class LinkClock(HostClock):
    def __init__(self, link: Link) -> None:
        self.link = link

    def mark(self) -> float:
        return self.link.now_s


def test_the_bandwidth_of_each_direction_is_measured_without_its_first_copy() -> None:
    link = Link()
    to_host, to_device = measure_link(link, LinkClock(link))
    torch.testing.assert_close((to_host, to_device), (2.0**30, 2.0**32))
    assert set(link.sizes) == {16 * MIB}
