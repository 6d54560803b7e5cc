"""Training steps that are estimated and really run on the CPU, and the bytes that the real ones hold."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from architectures import ARCHITECTURES, Workload
from counted_allocator import CountedAllocator
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_memopt.planning import MemoryEstimate, estimate_peak_memory

Setup = Callable[[torch.device], Any]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class State(NamedTuple):
    """The result of `setup`: tensors are inputs, and `loss` is called with the model and them."""

    model: nn.Module
    optimizer: Optimizer
    inputs: tuple[Tensor, ...]
    loss: Callable[..., Tensor]


def step(state: State, num_micro_batches: int = 1) -> None:
    for _ in range(num_micro_batches):
        state.loss(state.model, *state.inputs).backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def accumulating(state: State) -> None:
    step(state, num_micro_batches=3)


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def training(
    build: Callable[[], Workload], make_optimizer: MakeOptimizer = adamw, prepare: Callable[[Workload], Any] = str
) -> Setup:
    """Train a workload of `architectures.py`, which `prepare` changes in place first."""

    def setup(device: torch.device) -> State:
        workload = build()
        prepare(workload)
        trainable = [parameter for parameter in workload.module.parameters() if parameter.requires_grad]
        torch.manual_seed(1)
        return State(workload.module, make_optimizer(trainable), (), lambda model: workload.loss())

    return setup


def architecture(name: str, **options: Any) -> Setup:
    return training(ARCHITECTURES[name].build, **options)


class Peaks(NamedTuple):
    overall: int
    before_updates: int  # in forward and backward


def real_peaks(setup: Setup, step: Callable[[Any], object] = step, num_steps: int = 2) -> Peaks:
    """Return the most that live storages hold, to the byte."""
    allocator = CountedAllocator()
    with allocator:
        state = setup(torch.device("cpu"))
    allocator.charge((*state.model.parameters(), *state.model.buffers()))
    gc.collect()
    allocator.peak_bytes = allocator.allocated_bytes
    computing, updating = [], []

    def begin_update(*ignored: Any) -> None:
        computing.append(allocator.peak_bytes)
        allocator.reset_peaks()

    def end_update(*ignored: Any) -> None:
        updating.append(allocator.peak_bytes)
        allocator.reset_peaks()

    state.optimizer.register_step_pre_hook(begin_update)
    state.optimizer.register_step_post_hook(end_update)
    with allocator:
        for _ in range(num_steps):
            step(state)
    return Peaks(max(*computing, *updating), max(computing))


def estimated_peaks(estimate: MemoryEstimate) -> Peaks:
    return Peaks(estimate.peak_bytes, max(estimate.phases["forward"], estimate.phases["backward"]))


def deviations(setup: Setup, step: Callable[[Any], object] = step) -> tuple[float, float]:
    """Return both estimated peaks' deviations from the real ones, as shares; positive means above."""
    estimated = estimated_peaks(estimate_peak_memory(setup, step, like="cpu"))
    overall, before_updates = (guess / real - 1 for guess, real in zip(estimated, real_peaks(setup, step), strict=True))
    return overall, before_updates


WIDTH, HIDDEN, BATCH = 64, 256, 8


def mlp_setup(device: torch.device, make_optimizer: MakeOptimizer = adamw) -> State:
    """Make two linear layers without biases: every size is a multiple of 512 bytes."""
    with device:
        model = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False))
        inputs = torch.zeros(BATCH, WIDTH)
    return State(model, make_optimizer(list(model.parameters())), (inputs,), lambda model, x: model(x).square().mean())
