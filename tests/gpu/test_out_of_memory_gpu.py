"""Tests with a GPU that runs out of memory in each phase of a step: the report, and the memory afterwards."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import pytest
import torch
from nearly_full import nearly_full
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.memory import MemoryTracker, detect_leaks, explain_oom
from hf_memopt.memory.attribution import GRADIENT, OPTIMIZER_STATE, OTHER, PARAMETER, SAVED
from hf_memopt.units import format_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("small_heap"),
]

MIB = 2**20
SHAPE = (6144, 512)
BIG = 12 * MIB  # bytes of this shape; torch gives so large a tensor a segment of its own
ROOM = {"forward": BIG + 2 * MIB, "backward": MIB, "optimizer": MIB}  # at which each phase fails, forward half-way


class Scaled(nn.Module):
    """A layer of large tensors of one size, with little arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        product = self.scale * x
        return torch.tanh(product)


class Training:
    def __init__(self, offloader: ActivationOffloader | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Scaled(), nn.Linear(SHAPE[1], 8)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.x = torch.randn(SHAPE).cuda()
        self.offloader = offloader
        self.step()  # allocates the moments

    def step(self) -> None:
        for run in self._phases().values():
            run()
        self.optimizer.zero_grad()

    @contextmanager
    def before(self, phase: str) -> Iterator[Callable[[], None]]:
        """Run earlier phases, then yield on a device with too little memory for this one."""
        phases = self._phases()
        for earlier in list(phases)[: list(phases).index(phase)]:
            phases[earlier]()
        with nearly_full(ROOM[phase]):
            yield phases[phase]

    def fail(self, phase: str) -> None:
        """Run out of memory, and restore the state before the step."""
        weights, optimizer = deepcopy(self.model.state_dict()), deepcopy(self.optimizer.state_dict())
        with self.before(phase) as run, pytest.raises(torch.OutOfMemoryError):
            run()
        self.optimizer.zero_grad()
        # A failing optimizer has changed some of its state.
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)

    def state(self) -> list[Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.detach().cpu() for value in [*self.model.parameters(), *moments]]

    def _phases(self) -> dict[str, Callable[[], None]]:
        held: dict[str, Tensor] = {}
        return {
            "forward": lambda: held.update(loss=self._loss()),
            "backward": lambda: held.pop("loss").backward(),
            "optimizer": self.optimizer.step,
        }

    def _loss(self) -> Tensor:
        with self.offloader.offload_context(self.model) if self.offloader else nullcontext():
            return self.model(self.x).square().mean()


def settle(allocated_bytes: int) -> None:
    """Wait: autograd's thread drops a graph a moment after the error is raised."""
    deadline = time.monotonic() + 60
    while torch.cuda.memory_allocated() != allocated_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == allocated_bytes


def device_line() -> str:
    """Make the report's line from torch's public counters."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    in_pieces = torch.cuda.memory_stats()["inactive_split_bytes.all.current"]
    return (
        f"Of {format_bytes(total_bytes)} on cuda:0: {format_bytes(allocated)} in tensors, "
        f"{format_bytes(reserved - allocated)} reserved beside them "
        f"({format_bytes(in_pieces)} of it in pieces between tensors), "
        f"{format_bytes(total_bytes - free_bytes - reserved)} used by others "
        f"and by the device context, {format_bytes(free_bytes)} free."
    )


def live_by_kind(report: str) -> dict[str, str]:
    block = report.split("Live tensors:\n")[1].split("\n\n")[0]
    return {kind: held for held, kind in re.findall(r"^ +(\S+ \S+)  (.+)$", block, flags=re.MULTILINE)}


@pytest.mark.parametrize("phase", ROOM)
def test_the_report(phase: str) -> None:
    training = Training()
    with training.before(phase) as run:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught, explain_oom(training.model):
            run()
        expected_line = device_line()
    (report,) = caught.value.__notes__
    title, line, *_ = report.splitlines()
    assert title == f"Out-of-memory report: the {phase} phase{', in 0' if phase == 'forward' else ''}"
    assert line == expected_line
    num_bytes = sum(parameter.nbytes for parameter in training.model.parameters())
    found = live_by_kind(report)
    found.pop(OTHER)
    saved = {
        "forward": {SAVED: format_bytes(BIG)},
        "backward": {SAVED: format_bytes(2 * BIG)},
        "optimizer": {GRADIENT: format_bytes(num_bytes)},
    }
    assert found == {PARAMETER: format_bytes(num_bytes), OPTIMIZER_STATE: format_bytes(2 * num_bytes), **saved[phase]}


@pytest.mark.parametrize("phase", ROOM)
def test_the_tracker(phase: str) -> None:
    training = Training()
    allocated = torch.cuda.memory_allocated()
    with training.before(phase) as run:
        torch.cuda.reset_peak_memory_stats()
        with pytest.raises(torch.OutOfMemoryError):
            run()
        expected = torch.cuda.max_memory_allocated()
    training.optimizer.zero_grad()
    settle(allocated)
    before = torch.cuda.memory_stats()
    with training.before(phase) as run:
        torch.cuda.reset_peak_memory_stats()
        tracker = MemoryTracker("cuda", reset_peaks=True)
        with pytest.raises(torch.OutOfMemoryError), tracker.phase(phase):
            run()
    peak, after = tracker.step()[phase], torch.cuda.memory_stats()
    assert peak.exact
    assert peak.at_most_bytes == expected == tracker.highest_bytes
    assert peak.num_alloc_retries == after["num_alloc_retries"] - before["num_alloc_retries"] > 0
    assert tracker.read().device.counters.num_ooms == after["num_ooms"] == before["num_ooms"] + 1


OFFLOADERS: dict[str, Callable[[], ActivationOffloader | None]] = {
    "nothing": lambda: None,
    "all": lambda: ActivationOffloader(mode="all", offload_threshold_mb=0),
    "auto": lambda: ActivationOffloader(mode="auto", offload_threshold_mb=0, budget_gib=BIG / 2**30),
}


@pytest.mark.parametrize("offloads", OFFLOADERS)
@pytest.mark.parametrize("phase", ROOM)
def test_steps_go_on_as_if_nothing_had_been(phase: str, offloads: str) -> None:
    undisturbed, training = Training(), Training(OFFLOADERS[offloads]())
    for _ in range(2):
        training.step()
    allocated = torch.cuda.memory_allocated()
    training.fail(phase)
    settle(allocated)
    for _ in range(2):
        training.step()
    for _ in range(4):
        undisturbed.step()
    assert all(torch.equal(ours, want) for ours, want in zip(training.state(), undisturbed.state(), strict=True))
    assert torch.cuda.memory_allocated() == allocated
    if training.offloader is not None:
        assert training.offloader.stats.host_bytes_live == 0
        assert training.offloader.stats.bytes_moved >= 2 * BIG


@pytest.mark.parametrize("keeps", [False, True])
def test_what_an_error_holds_leaks_if_it_is_kept(keeps: bool) -> None:
    training = Training()
    errors: list[BaseException] = []

    def step() -> None:
        with training.before("forward") as run:
            try:
                run()
            except torch.OutOfMemoryError as error:
                errors[:] = [*errors, error] if keeps else []
            else:
                pytest.fail("there was enough memory")

    before = torch.cuda.memory_allocated()
    report = detect_leaks(step, num_steps=24)
    grown = torch.cuda.memory_allocated() - before
    assert report.leaking == keeps
    assert report.bytes_per_step == grown / 24 == (BIG if keeps else 0)
    errors.clear()
    assert torch.cuda.memory_allocated() == before
