"""Tests of OffloadedTeacher on a GPU: order of the stream copier, memory, no host synchronisation."""

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from host_waits import host_never_waits
from interrupts import Interrupter
from torch import Tensor, nn

from hf_memopt.transfer import StreamCopier
from hf_memopt.weights import OffloadedTeacher, VisitsByCall

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SLEEP_CYCLES = 200_000_000  # about 0.1 s: far longer than any delay that could hide a missing wait


@pytest.fixture
def network() -> nn.Module:
    """A transfer-bound network: 64 MiB of weights and little arithmetic."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 2048, generator=torch.Generator().manual_seed(1)).cuda()


@pytest.fixture
def want(network: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(network).cuda()(x)


def swapped(network: nn.Module) -> OffloadedTeacher:
    return OffloadedTeacher(network, device="cuda", mode="swap")


def test_compute_waits_for_a_slow_copy(network: nn.Module, x: Tensor, want: Tensor) -> None:
    copier = StreamCopier("cuda")
    teacher = OffloadedTeacher(network, device="cuda", mode="swap", copier=copier)
    for _ in range(5):
        with copier._stream_to_device:
            torch.cuda._sleep(SLEEP_CYCLES)
        with teacher.onload() as module:
            got = module(x)
        # Overwrites released memory.
        torch.full((network[0].weight.numel() * 4,), float("nan"), device="cuda")
        assert torch.equal(got, want)
    torch.cuda.synchronize()
    assert teacher.report().stall_ms > 5 * 10


def test_a_copy_waits_for_slow_compute_on_recycled_memory(network: nn.Module, x: Tensor, want: Tensor) -> None:
    teacher = swapped(network)
    for _ in range(5):
        scratch = torch.ones(teacher.report().host_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(SLEEP_CYCLES)
        scratch.fill_(255)  # runs after the sleep, on memory that the teacher gets next
        del scratch
        teacher.prefetch()
        with teacher.onload() as module:
            assert torch.equal(module(x), want)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python swallows it in destructors
@pytest.mark.parametrize("mode", ["swap", "stream"])
@pytest.mark.parametrize("home", ["host", "file"])
def test_interrupted_copies_are_over_before_their_memory_is_given_back(
    network: nn.Module, x: Tensor, want: Tensor, mode: Any, home: Any, tmp_path: Path
) -> None:
    copier, disk = StreamCopier("cuda"), tmp_path if home == "file" else None
    teacher = OffloadedTeacher(network, device="cuda", mode=mode, copier=copier, home=home, disk=disk)

    def visit() -> Tensor:
        with torch.no_grad(), teacher.onload() as module:
            return cast(Tensor, module(x))

    def slow_visit() -> None:
        with copier._stream_to_device:
            torch.cuda._sleep(SLEEP_CYCLES // 10)
        visit()

    interrupter = Interrupter("/hf_memopt/weights/", "/hf_memopt/transfer/")
    for place in interrupter.at_places(slow_visit, 12):
        held = torch.full((8 * 2048 * 2048,), 1.0, device="cuda")  # released memory, and more
        assert torch.equal(visit(), want), place
        torch.cuda.synchronize()
        assert held.eq(1.0).all(), place
        assert teacher.report().device_bytes == 0


def test_memory_leaves_with_the_teacher(network: nn.Module, x: Tensor, want: Tensor) -> None:
    teacher = swapped(network)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        with teacher.onload() as module, torch.no_grad():
            assert torch.cuda.memory_allocated() == before + teacher.report().host_bytes
            module(x)
        assert torch.cuda.memory_allocated() == before
    assert teacher.report().bytes_host_to_device == 20 * teacher.report().host_bytes
    assert teacher.report().bytes_device_to_host == 0


def test_the_host_never_waits(network: nn.Module, x: Tensor) -> None:
    teacher = swapped(network)
    with teacher.onload() as module, torch.no_grad():
        module(x)
    with host_never_waits():
        teacher.prefetch()
        with teacher.onload() as module, torch.no_grad():
            module(x)


def test_the_master_is_pinned_and_has_its_exact_size(network: nn.Module) -> None:
    teacher = swapped(network)
    assert teacher._placement._home._master.is_pinned()
    assert teacher._placement._home._master.untyped_storage().nbytes() == teacher.report().host_bytes


def test_resident_weights_live_on_the_device(network: nn.Module, x: Tensor, want: Tensor) -> None:
    teacher = OffloadedTeacher(network, device="cuda", mode="resident")
    report = teacher.report()
    assert (report.home, report.host_bytes) == ("cuda", 0)
    with teacher.onload() as module:
        assert torch.equal(module(x), want)


@pytest.mark.parametrize("mode", ["swap", "stream", "auto"])
def test_each_call_is_a_visit_in_whichever_mode_torch_is(
    mode: str, network: nn.Module, x: Tensor, want: Tensor
) -> None:
    before = torch.cuda.memory_allocated()
    visits = VisitsByCall(OffloadedTeacher(network, device="cuda", mode=mode))
    # TRL calls reference models without gradients, and reward models in inference mode.
    for context in (torch.inference_mode, torch.no_grad, torch.no_grad, torch.inference_mode, torch.no_grad):
        with context():
            got = network(x)
        assert torch.equal(got, want)
        del got
    assert visits.teacher.report().bytes_host_to_device >= 5 * visits.teacher.report().host_bytes
    if mode == "swap":
        assert torch.cuda.memory_allocated() == before
