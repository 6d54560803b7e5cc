"""The simulated first of several ranks, compared with real processes on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import check_first_rank
from simulated import simulated, unread_base
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from hf_memopt.planning import estimate_peak_memory
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.planning.simulation.ranks.first_rank import BACKEND, first_of


@pytest.mark.ranks
def test_three_real_ranks_hold_the_same_bytes_after_an_update_and_at_the_peak_of_each_phase(tmp_path: Path) -> None:
    check_first_rank(tmp_path, 3, "WAYS")


@pytest.mark.ranks
def test_two_real_ranks_whose_weights_are_on_the_host_do_so_too(tmp_path: Path) -> None:
    check_first_rank(tmp_path, 2, "OFFLOADING_WAYS")


@pytest.mark.slow
def test_two_real_ranks_do_so_too(tmp_path: Path) -> None:
    check_first_rank(tmp_path, 2, "WAYS")


def test_it_is_the_first_of_a_group_whose_meshes_have_numbers() -> None:
    def look(device: torch.device) -> Any:
        with first_of(4, device, unread_base()):
            mesh = distributed.init_device_mesh(device.type, (2, 2))
            return distributed.get_rank(), distributed.get_world_size(), mesh.shape, mesh.get_coordinate()

    rank, num_ranks, shape, place = simulated(look)
    assert (rank, num_ranks, tuple(shape), list(place)) == (0, 4, (2, 2), [0, 0])


def test_a_member_of_a_real_group_is_refused() -> None:
    def estimate() -> None:
        distributed.init_process_group(BACKEND, rank=0, world_size=2, store=distributed.HashStore())
        with first_of(2, torch.device("cpu"), unread_base()):
            pass

    with pytest.raises(ValueError, match="num_gpus=2: this process belongs to a process group already"):
        run_isolated(estimate)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_options_of_ddp_that_ask_for_values_are_refused(option: str) -> None:
    def wrap(device: torch.device) -> None:
        with first_of(2, device, unread_base()):
            DistributedDataParallel(torch.nn.Linear(2, 2, device=device), **{option: True})

    with pytest.raises(ValueError, match=f"{option}=True of DDP is not simulated; leave it out"):
        simulated(wrap)


def test_hooks_of_ddp_are_refused() -> None:
    def wrap(device: torch.device) -> None:
        with first_of(2, device, unread_base()):
            DistributedDataParallel(torch.nn.Linear(2, 2, device=device)).register_comm_hook(None, print)

    with pytest.raises(ValueError, match="communication hooks of DDP are not simulated"):
        simulated(wrap)


def test_memory_of_another_stream_is_noted_as_such() -> None:
    def setup(device: torch.device) -> torch.Tensor:
        return torch.zeros(1024, device=device)

    def step(state: torch.Tensor) -> torch.Tensor:
        module = torch.get_device_module(state.device)
        with module.stream(module.Stream()):
            other = state + 1
        return other + state

    estimate = estimate_peak_memory(setup, step, num_steps=1)
    assert list(estimate.trace.streams) == [1]
