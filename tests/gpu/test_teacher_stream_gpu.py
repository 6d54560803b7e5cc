"""Tests of streamed teachers on a GPU: in-place reads, order, memory, no host synchronisation."""

import copy
from pathlib import Path

import pytest
import torch
from host_waits import host_never_waits
from torch import Tensor, nn

from hf_memopt.transfer import StreamCopier
from hf_memopt.transfer.backends import readable_in_place
from hf_memopt.transfer.host_memory import pinned_empty
from hf_memopt.weights import OffloadedTeacher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SLEEP_CYCLES = 20_000_000  # about 10 ms: far longer than a block's copy or compute


class Network(nn.Module):
    """A network of 12 layers used once, 3 layers used five times, each of 4 MiB, and a table of 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16384, 1024)
        self.once = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(12))
        self.often = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.once:
            x = layer(x).tanh()
        for _ in range(5):
            for layer in self.often:
                x = layer(x).tanh()
        return x


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network().eval().requires_grad_(False)


@pytest.fixture
def tokens() -> Tensor:
    return torch.arange(7, device="cuda")


@pytest.fixture
def want(network: Network, tokens: Tensor) -> Tensor:
    return copy.deepcopy(network).cuda()(tokens)


def test_page_locked_memory_is_read_in_place() -> None:
    master = pinned_empty(4096, torch.device("cuda"))
    master.copy_(torch.arange(4096).to(torch.uint8))
    mapped = readable_in_place(master, torch.device("cuda"))
    assert mapped.is_cuda
    assert torch.equal(mapped[100:200].clone().cpu(), master[100:200])
    with pytest.raises(ValueError, match="page-locked"):
        readable_in_place(torch.empty(64, dtype=torch.uint8), torch.device("cuda"))


@pytest.mark.parametrize("budget_gib", [None, 0])
def test_outputs_are_bitwise_resident(network: Network, tokens: Tensor, want: Tensor, budget_gib: float | None) -> None:
    teacher = OffloadedTeacher(network, device="cuda", mode="stream", budget_gib=budget_gib)
    for _ in range(5):
        teacher.prefetch()
        with teacher.onload() as module:
            got = module(tokens)
        torch.full((2**22,), float("nan"), device="cuda")  # overwrites any released slot
        assert torch.equal(got, want)
    assert teacher.report().device_bytes == teacher.report().bytes_device_to_host == 0


@pytest.mark.parametrize("mode", ["swap", "stream", "auto"])
def test_outputs_from_a_file_are_bitwise_resident(
    network: Network, tokens: Tensor, want: Tensor, mode: str, tmp_path: Path
) -> None:
    teacher = OffloadedTeacher(network, device="cuda", mode=mode, home="file", files=(), disk=tmp_path)
    for _ in range(5):
        teacher.prefetch()
        with teacher.onload() as module:
            got = module(tokens)
        torch.full((2**22,), float("nan"), device="cuda")  # overwrites any released slot
        assert torch.equal(got, want)
    report = teacher.report()
    assert report.home == "file"
    assert report.device_bytes == report.bytes_device_to_host == 0


def test_slow_copies_and_slow_compute_change_nothing(network: Network, tokens: Tensor, want: Tensor) -> None:
    copier = StreamCopier("cuda")
    teacher = OffloadedTeacher(network, device="cuda", mode="stream", copier=copier)
    with teacher.onload() as module:
        module(tokens)
    for slow_copies in (True, False):
        handles = [layer.register_forward_hook(lambda *_: torch.cuda._sleep(SLEEP_CYCLES)) for layer in network.once]
        if slow_copies:
            with copier._stream_to_device:
                torch.cuda._sleep(5 * SLEEP_CYCLES)
        with teacher.onload() as module:
            assert torch.equal(module(tokens), want)
        for handle in handles:
            handle.remove()


def test_device_memory_keeps_to_the_formula(network: Network, tokens: Tensor) -> None:
    teacher = OffloadedTeacher(network, device="cuda", mode="stream")
    with teacher.onload() as module:
        module(tokens)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with teacher.onload() as module:
        module(tokens)
    activations = 2**20
    predicted = teacher.report().predicted_device_bytes
    assert predicted is not None
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * predicted + activations
    assert predicted <= 5 * 4 * 2**20


def test_steady_state_never_waits_for_the_device(network: Network, tokens: Tensor) -> None:
    teacher = OffloadedTeacher(network, device="cuda", mode="stream")
    for _ in range(2):
        with teacher.onload() as module:
            module(tokens)
    with host_never_waits():
        teacher.prefetch()
        with teacher.onload() as module:
            module(tokens)


def test_auto_chooses_resident_where_there_is_room(network: Network, tokens: Tensor, want: Tensor) -> None:
    student = nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.AdamW(student.parameters())
    teacher = OffloadedTeacher(network, device="cuda")
    for _ in range(4):
        with teacher.onload() as module:
            assert torch.equal(module(tokens), want)
        student(torch.ones(1, 8, device="cuda")).sum().backward()
        optimizer.step()
    report = teacher.report()
    assert (report.mode, report.host_bytes) == ("resident", 0)
    assert report.predicted_device_bytes == report.peak_device_bytes


def test_a_quantised_teacher_is_bitwise_the_same(tokens: Tensor) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).eval()
    quantize_(network, Int8WeightOnlyConfig())
    x = torch.randn(2, 256, device="cuda")
    with torch.no_grad():
        want = copy.deepcopy(network).cuda()(x)
        for mode in ("swap", "stream"):
            teacher = OffloadedTeacher(copy.deepcopy(network), device="cuda", mode=mode)
            for _ in range(3):
                with teacher.onload() as module:
                    assert module[0].weight.device.type == "cuda"
                    assert torch.equal(module(x), want)
