import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.recipes.common.options import OffloadOptions
from hf_memopt.recipes.common.results import CPU_CAPTION, DISK_CAPTION, RunCost, StepTimer, announce, table


def cost_of_the_last(timer: StepTimer, offloader: ActivationOffloader) -> RunCost:
    """Return the cost of one update after a restart, before which there were three."""
    layer, x = nn.Linear(16, 16), torch.ones(16, 16)
    for num_updates in (3, 1):
        timer.restart()
        for _ in range(num_updates):
            timer.begin()
            with offloader.offload_context(layer):
                loss = layer(x.requires_grad_()).square().sum()
            loss.backward()
            timer.end()
    return timer.cost()


def test_the_table_shows_how_modes_compare() -> None:
    costs = [RunCost("off", 1.0, compared="reference"), RunCost("all", 1.0, compared="different, not by rounding")]
    assert table(costs, "cpu").splitlines()[2].endswith("different, not by rounding")


def test_a_timer_counts_the_updates_since_its_last_restart() -> None:
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier())
    timer = StepTimer("all", torch.device("cpu"), offloader)
    assert timer.cost() == RunCost("all")
    cost = cost_of_the_last(timer, offloader)
    assert cost.moved_mib is not None
    assert cost.moved_mib * 2**20 == pytest.approx(4 * 16 * 16)  # bytes of the output; the input is a leaf
    assert (cost.step_ms is None, cost.peak_mib, cost.compared) == (False, None, None)


def test_saved_activations_are_those_of_the_largest_update() -> None:
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier())
    timer = StepTimer("all", torch.device("cpu"), offloader)
    layer, peaks_gib = nn.Linear(16, 16), []
    for rows in (32, 8):
        timer.begin()
        with offloader.offload_context(layer):
            loss = layer(torch.ones(rows, 16)).tanh().square().sum()
        loss.backward()
        timer.end()
        peaks_gib.append(offloader.stats.measured_peak_gib)
    assert peaks_gib[1] < peaks_gib[0]
    assert timer.cost().saved_mib == 1024 * peaks_gib[0]


def test_bytes_written_to_a_disk_are_counted_by_update(tmp_path: Path) -> None:
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, disk=tmp_path)
    cost = cost_of_the_last(StepTimer("all", torch.device("cpu"), offloader), offloader)
    page_mib = 4096 / 2**20
    # A page, and a second one for bytes that begin within the first.
    assert cost.written_mib in (page_mib, 2 * page_mib)
    assert cost.disk_mib is not None
    assert cost.disk_mib >= cost.written_mib
    assert cost.host_mib == 0
    plain = RunCost("off", 1.0)
    shown = table([plain, cost], "cpu")
    assert "written MiB/step" in shown
    assert DISK_CAPTION in shown
    assert CPU_CAPTION in table([plain], "cpu")
    assert "disk MiB" not in table([plain, RunCost("all", 1.0, host_mib=1.0)], "cpu")


@pytest.mark.parametrize(
    ("given", "words"),
    [({}, "NOTHING WILL BE OFFLOADED"), ({"disk": "."}, "mode auto"), ({"cpu_copies": True}, "mode auto")],
)
def test_a_run_on_a_cpu_is_told_whether_anything_moves(
    given: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hf_memopt")
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=1, mixed_precision="no")
    announce(nn.Linear(2, 2), OffloadOptions(**given), accelerator)
    assert words in caplog.messages[-1]
