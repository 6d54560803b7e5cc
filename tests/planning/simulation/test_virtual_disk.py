"""The disk of a simulated run: times in closed form, bytes by step, and the limits of both memories."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_memopt import ActivationOffloader
from hf_memopt.planning import MemoryEstimate, estimate_peak_memory
from hf_memopt.planning.cards.gpus import CARDS
from hf_memopt.planning.cards.memory_below import Disk, MemoryBelow
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.estimate_report import as_facts
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.planning.simulation.virtual_disk import VirtualDisk
from hf_memopt.planning.simulation.virtual_time import VirtualClock
from hf_memopt.units import GIB, MIB

CARD = replace(CARDS["rtx4090"], link_bytes_per_s=1e12)
# The input of each layer, and as many storages.
LAYER_BYTES, DEPTH, HOST_BYTES = 16 * MIB, 8, 100 * MIB


def test_a_file_has_a_queue_in_each_direction() -> None:
    clock = VirtualClock(CARD)
    file = VirtualDisk(clock, Disk(GIB, 1e9)).open_file(None, None)
    assert file is not None
    extents = [file.space.acquire(10**6) for _ in range(2)]
    memory = torch.empty(0)
    writes = [file.write(memory, extent) for extent in extents if extent is not None]
    read = file.read(writes and extents[0], memory)  # type: ignore[arg-type]
    each_s = file.bytes_written / 2 / 1e9
    assert not read.is_over()
    read.wait()
    assert clock.now_s == pytest.approx(each_s)
    assert writes[0].is_over()
    assert not writes[1].is_over()
    writes[1].wait()
    assert clock.now_s == pytest.approx(2 * each_s)
    assert clock.stalled_s == clock.now_s


def test_a_run_has_one_file_and_counts_what_a_step_writes() -> None:
    disk = VirtualDisk(VirtualClock(CARD), None)
    assert disk.open_file(None, None) is None
    assert (disk.peak_bytes, disk.step_written.total()) == (0, 0)
    file = disk.open_file("/nvme", MIB)
    assert file is not None
    assert disk.open_file("/other", None) is file
    assert file.space.acquire(2 * MIB) is None
    extent = file.space.acquire(1000)
    assert extent is not None
    for _ in range(2):
        disk.begin_step()
        file.write(torch.empty(0), extent)
    assert disk.step_written.total() == extent.num_bytes
    file.space.release(extent)
    file.space.trim()
    file.space.trim()
    assert disk.peak_bytes == extent.num_bytes > file.space.bytes_held


def setup(device: torch.device, **options: Any) -> Any:
    with device:
        layers = [nn.Linear(1024, 1024) for _ in range(DEPTH)]
        model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        batch = torch.zeros(LAYER_BYTES // 4096, 1024)
    offloader = ActivationOffloader(**{"mode": "all", "offload_threshold_mb": 1.0} | options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch, offloader


def step(state: Any) -> None:
    model, optimizer, batch, offloader = state
    with offloader.offload_context(model):
        loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def estimate(host_bytes: int | None, disk: Disk | None, **options: Any) -> MemoryEstimate:
    simulated = SimulatedStep(lambda device: setup(device, **options), step)
    return run_isolated(lambda: simulate_step(simulated, gpu=CARD, below=MemoryBelow(host_bytes, disk)))


@pytest.fixture(scope="module")
def on_disk() -> MemoryEstimate:
    return estimate(HOST_BYTES, Disk(GIB, 5e9))


def test_what_the_host_has_no_room_for_goes_to_the_disk_at_its_speed(on_disk: MemoryEstimate) -> None:
    roomy, poor = estimate(GIB, Disk(GIB, 5e9)), estimate(HOST_BYTES, None)
    assert roomy.disk_bytes == poor.disk_bytes == 0
    assert on_disk.host_bytes <= HOST_BYTES
    assert on_disk.disk_bytes > 3 * LAYER_BYTES
    assert on_disk.peak_bytes == roomy.peak_bytes < poor.peak_bytes
    assert on_disk.step_ms is not None
    assert roomy.step_ms is not None
    # Nothing computes as long as a disk writes: what it writes and reads is waited for.
    assert on_disk.step_ms > roomy.step_ms + 1e3 * on_disk.disk_bytes_written / 5e9


def test_a_full_disk_leaves_storages_on_the_card(on_disk: MemoryEstimate) -> None:
    full = estimate(HOST_BYTES, Disk(2 * LAYER_BYTES + 2**16, 5e9))
    assert 2 * LAYER_BYTES <= full.disk_bytes <= 2 * LAYER_BYTES + 2**16
    assert full.peak_bytes > on_disk.peak_bytes


def test_an_estimate_says_what_the_disk_holds_and_how_much_is_written(on_disk: MemoryEstimate) -> None:
    assert on_disk.step_ms is not None
    per_day = on_disk.disk_bytes_written / on_disk.step_ms * 86_400_000 / 1e12
    assert on_disk.disk_tb_per_day == pytest.approx(per_day)
    held = f"{on_disk.disk_bytes / GIB:.2f} GiB; {on_disk.disk_bytes_written / GIB:.2f} GiB written in a step"
    line = f"{held}, {per_day:.2f} TB per day at this rate"
    assert f"Disk: {line}" in on_disk.text(CARD)
    assert as_facts(on_disk)["kept on the disk"] == line
    twice = on_disk.with_passes(2)
    assert twice.disk_bytes_written == 2 * on_disk.disk_bytes_written
    assert twice.disk_bytes == on_disk.disk_bytes


def test_an_offloaders_own_folder_is_simulated_and_never_opened(tmp_path: Path) -> None:
    found = estimate_peak_memory(lambda device: setup(device, disk=tmp_path, host_budget_gib=HOST_BYTES / GIB), step)
    assert found.disk_bytes > 3 * LAYER_BYTES
    assert found.disk_tb_per_day is None
