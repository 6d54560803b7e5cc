"""The compiled parts of optimizers on the host: times in closed form."""

from dataclasses import replace

import pytest
import torch

from hf_memopt.planning.cards.gpus import CARDS
from hf_memopt.planning.cards.memory_below import Disk
from hf_memopt.planning.simulation.virtual_disk import AioHandle, CpuAdam, VirtualDisk
from hf_memopt.planning.simulation.virtual_time import VirtualClock
from hf_memopt.units import GIB, MIB

CARD = replace(CARDS["rtx4090"], link_bytes_per_s=1e10)
HOST_BYTES_PER_S = 1e9


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(CARD, host_bytes_per_s=HOST_BYTES_PER_S)


def test_deepspeeds_adam_reads_gradients_and_reads_and_writes_weights_and_moments(clock: VirtualClock) -> None:
    adam = CpuAdam(clock)
    weight, gradient, first, second = (torch.empty(MIB) for _ in range(4))
    adam.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    adam.adam_update(0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, weight, gradient.bfloat16(), first, second)
    adam.destroy_adam(0)
    assert clock.host_s == pytest.approx((2 * MIB + 2 * 3 * 4 * MIB) / HOST_BYTES_PER_S)
    assert clock.now_s == 0.0


def test_deepspeeds_files_take_the_disks_time_and_the_host_waits(clock: VirtualClock) -> None:
    disk = VirtualDisk(clock, Disk(GIB, 1e9))
    handle = AioHandle(disk)
    buffer = handle.new_cpu_locked_tensor(10**6, torch.empty(0, dtype=torch.bfloat16))
    assert (buffer.nbytes, buffer.dtype, handle.is_pinned(buffer)) == (2 * 10**6, torch.bfloat16, True)
    disk.begin_step()
    assert handle.async_pwrite(buffer, "moments", 0) == handle.async_pread(buffer, "weights", 0) == 0
    assert handle.async_pwrite(buffer, "weights", 0) == 0
    assert clock.host_s == 0.0
    assert handle.wait() == 3
    assert clock.host_s == pytest.approx(2 * 2e-3)  # writes queue, the read runs beside them
    assert handle.wait() == 0
    assert (disk.step_written.total(), disk.peak_bytes) == (4 * 10**6, 4 * 10**6)
