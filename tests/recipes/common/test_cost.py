import math

import pytest
import torch
from torch import nn

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.recipes.common.cost import RunCost, StepTimer, table


def test_the_table_shows_losses_that_differ() -> None:
    costs = [RunCost("off", 1.0, losses=[3.0, 2.0]), RunCost("all", 1.0, losses=[3.0, math.nextafter(2.0, 3.0)])]
    shown = table(costs, "cpu")
    assert "1 of 2 losses equal" in shown
    assert "bitwise equal" not in shown


def test_a_timer_counts_the_updates_since_its_last_restart() -> None:
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier())
    timer = StepTimer("all", torch.device("cpu"), offloader)
    assert timer.cost() == RunCost("all")
    layer, x = nn.Linear(16, 16), torch.ones(16, 16)
    for num_updates in (3, 1):
        timer.restart()
        for _ in range(num_updates):
            timer.begin()
            with offloader.offload_context(layer):
                loss = layer(x.requires_grad_()).square().sum()
            loss.backward()
            timer.end()
        cost = timer.cost()
    assert cost.moved_mib is not None
    assert cost.moved_mib * 2**20 == pytest.approx(x.nbytes)  # bytes of the output; the input is a leaf
    assert (cost.step_ms is None, cost.peak_mib, cost.losses) == (False, None, [])


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
