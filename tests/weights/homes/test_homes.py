"""Tests that weights at home in files are bitwise those in host memory, in every mode, and take no memory there."""

import copy
import itertools
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import COPIERS, AdversarialCopier, InjectedError
from safetensors.torch import save_file
from teacher_files import at_home_in_file, checkpoint
from teacher_toys import WIDTH, Network, Sampler
from torch import Tensor, nn

from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.transfer import Copier, SyncCopier, file_reader
from hf_memopt.transfer.direct_io import PAGE
from hf_memopt.transfer.scratch_file import DiskError
from hf_memopt.weights import OffloadedTeacher, VisitsByCall
from hf_memopt.weights.homes.home import FileHome, HostHome, WeightsHome
from hf_memopt.weights.homes.packed_weights import PackedWeights
from hf_memopt.weights.homes.weight_files import in_files
from hf_memopt.weights.residency.visiting import Visiting

MODES = ("resident", "swap", "stream", "auto")
# None reads to the CPU's memory directly, the others through memory on the way.
ALL_COPIERS: dict[str, Callable[[], Copier | None]] = {"none": lambda: None, **COPIERS}


@pytest.fixture
def sampler() -> Sampler:
    torch.manual_seed(0)
    return Sampler().eval().requires_grad_(False)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(500, (2, 3), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["whole parts", "parts of a page"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read whole weights at a time, and page by page."""
    if request.param == "parts of a page":
        monkeypatch.setattr(file_reader, "PART_BYTES", PAGE)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copier", ALL_COPIERS)
@pytest.mark.sweep(share=0.15)
def test_outputs_are_bitwise_those_of_the_plain_module(
    sampler: Sampler, tokens: Tensor, mode: str, copier: str, tmp_path: Path
) -> None:
    reference = copy.deepcopy(sampler)
    files = [checkpoint(sampler, tmp_path)]
    teacher = at_home_in_file(sampler, tmp_path, mode, files=files, copier=ALL_COPIERS[copier]())
    for num_steps in (2, 1, 3):
        teacher.prefetch()
        with teacher.onload() as module:
            assert torch.equal(module.sample(tokens, num_steps), reference.sample(tokens, num_steps))
            assert torch.equal(module.head(torch.ones(WIDTH)), reference.head(torch.ones(WIDTH)))
        assert torch.equal(module.sample(tokens, 2), reference.sample(tokens, 2))  # the module works at home
    report = teacher.report()
    assert report.home == ("cpu" if mode == "resident" else "file")
    assert report.bytes_device_to_host == 0
    assert report.mode == ("stream" if mode == "auto" else mode)
    assert (report.bytes_read > 0) == (mode != "resident")
    assert report.own_bytes >= sum(each.nbytes for each in reference.parameters())
    assert (f"  in files: {report.file_bytes / 2**20:.1f} MiB; read" in str(report)) == (mode != "resident")
    if mode != "resident":
        assert report.device_bytes == 0


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("copier", ALL_COPIERS)
def test_ties_strides_buffers_and_dtypes(network: Network, x: Tensor, copier: str, tmp_path: Path) -> None:
    want = network(x)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    teacher = at_home_in_file(network, tmp_path, files=[checkpoint(network, tmp_path)], copier=ALL_COPIERS[copier]())
    for _ in range(2):
        with teacher.onload() as module:
            assert torch.equal(module(x), want)
            assert module.tied.weight.data_ptr() == module.embed.weight.data_ptr()
        assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("schedule", ["early", "late", "random"])
def test_a_device_that_reads_no_mapped_memory_is_brought_all_it_reads(
    sampler: Sampler, tokens: Tensor, schedule: str, tmp_path: Path
) -> None:
    reference = copy.deepcopy(sampler)
    teacher = at_home_in_file(sampler, tmp_path, "stream", device="cuda", copier=AdversarialCopier(schedule))
    many = torch.arange(500).repeat(2)
    for num_steps in (2, 3):
        with teacher.onload() as module:
            assert torch.equal(module.sample(tokens, num_steps), reference.sample(tokens, num_steps))
        with teacher.onload() as module:  # a path that was not traced
            assert torch.equal(module.head.weight[3] * 2, reference.head.weight[3] * 2)
            assert torch.equal(module.embedding(many), reference.embedding(many))
            assert torch.equal(module.sample(tokens, 1, use_head=True), reference.sample(tokens, 1, use_head=True))
    assert teacher.report().device_bytes == sum(buffer.nbytes for buffer in sampler.buffers())


def test_only_looked_up_rows_of_an_embedding_travel(sampler: Sampler, tokens: Tensor, tmp_path: Path) -> None:
    teacher = at_home_in_file(sampler, tmp_path, "stream", device="cuda", copier=AdversarialCopier())
    before = 0
    for _ in range(3):
        before = teacher.report().bytes_read
        with teacher.onload() as module:
            module.sample(tokens, 2)
    unread = sampler.embedding.weight.nbytes + sampler.head.weight.nbytes
    all_bytes = sum(each.nbytes for each in sampler.parameters())
    assert teacher.report().bytes_read - before < all_bytes - unread + 256 * 200


def test_a_known_visit_reads_nothing_that_no_call_announces(
    sampler: Sampler, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = at_home_in_file(sampler, tmp_path, "stream", device="cuda", copier=AdversarialCopier())
    held: list[str] = []
    read = Visiting.read

    def watched(self: Visiting, function: Any, args: Any, kwargs: Any, parameters: list[Tensor]) -> Any:
        held.extend(self.names[self._slices_of[id(each)][0]] for each in parameters)
        return read(self, function, args, kwargs, parameters)

    monkeypatch.setattr(Visiting, "read", watched)
    for _ in range(2):
        held.clear()
        with teacher.onload() as module:
            module.sample(tokens, 2)
    assert held == ["embedding.weight", "gain"]  # rows, and a weight of the module that is not called


def test_calls_are_visits_and_equal_weights_are_the_students(network: Network, x: Tensor, tmp_path: Path) -> None:
    student = copy.deepcopy(network)
    student.transposed.requires_grad_(False)
    want = network(x)
    teacher = at_home_in_file(network, tmp_path, "stream", share_with=student.requires_grad_(False))
    assert teacher.report().shared_bytes == sum(each.nbytes for each in student.parameters())
    visits = VisitsByCall(teacher)
    for _ in range(3):
        assert torch.equal(network(x), want)
    visits.remove()
    with torch.no_grad():
        student.embed.weight[0, 0] += 1
    with pytest.raises(RuntimeError, match="has been written"), teacher.onload():
        pass


def test_teachers_of_one_file_do_not_disturb_each_other(network: Network, x: Tensor, tmp_path: Path) -> None:
    want = network(x)
    files = [checkpoint(network, tmp_path)]
    modes = ("swap", "stream")
    teachers = [at_home_in_file(copy.deepcopy(network), tmp_path, mode, files=files) for mode in modes]
    for _ in range(2):
        for teacher in teachers:
            teacher.prefetch()
        with teachers[0].onload() as first, teachers[1].onload() as second:
            assert torch.equal(first(x), want)
            assert torch.equal(second(x), want)


def test_gradients_of_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).requires_grad_(False)
    x = torch.randn(2, 8, requires_grad=True)
    (want,) = torch.autograd.grad(module(x).square().sum(), x)
    teacher = at_home_in_file(module, tmp_path, "stream")
    for _ in range(3):
        with teacher.onload() as module:
            (got,) = torch.autograd.grad(module(x).square().sum(), x)
        assert torch.equal(got, want)


# ------------------------------------------------------------------------------------------------ rows of tables


class Tables(nn.Module):
    """Tables whose rows lie in memory in each way."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, value in {
            "plain": torch.randn(50, 6, generator=generator),
            "one_number": torch.randn(50, generator=generator),
            "blocks": torch.randn(50, 2, 3, generator=generator),
            "low": torch.randn(50, 3, generator=generator).bfloat16(),
            "whole_numbers": torch.randint(256, (50, 3), generator=generator).to(torch.uint8),
            "complex": torch.randn(50, 3, generator=generator, dtype=torch.complex64),
            "half_of_each_row": torch.randn(50, 6, generator=generator)[:, 1:4],
            "each_second_row": torch.randn(100, 6, generator=generator)[1::2],
            "transposed": torch.randn(6, 50, generator=generator).t(),
            "each_second_column": torch.randn(50, 6, generator=generator)[:, ::2],
            "repeated": torch.randn(1, 6, generator=generator).expand(50, 6),
            "not_a_number": torch.full((50, 3), -1, dtype=torch.int32).view(torch.float32),
        }.items():
            self.register_buffer(name, value)
        self.part = nn.Parameter(self.plain[10:], requires_grad=False)  # in one slice with `plain`


HOMES: dict[str, Callable[[PackedWeights, Path], WeightsHome]] = {
    "host": lambda weights, _: HostHome(weights, packed(weights), SyncCopier()),
    "file": lambda weights, folder: FileHome(weights, in_files(weights, [], folder), None),
    "staged": lambda weights, folder: FileHome(weights, in_files(weights, [], folder), SyncCopier()),
}
INDICES: dict[str, Tensor] = {
    "many": torch.randint(40, (3, 70), generator=torch.Generator().manual_seed(0)),
    "int32": torch.tensor([[39, 0], [0, 7]], dtype=torch.int32),
    "strided": torch.arange(40)[::3],
    "one": torch.tensor(5),
    "none": torch.empty(2, 0, dtype=torch.int64),
}


def packed(weights: PackedWeights) -> Tensor:
    block = torch.empty(weights.num_bytes, dtype=torch.uint8)
    weights.pack(block)
    return block


@pytest.mark.parametrize("indices", INDICES)
@pytest.mark.parametrize("home", HOMES)
def test_rows_are_bitwise_those_of_the_table(home: str, indices: str, tmp_path: Path) -> None:
    tables = Tables()
    weights = PackedWeights(tables)
    made = HOMES[home](weights, tmp_path)
    num_tables = 0
    for number, piece in enumerate(weights.slices):
        for place, each in enumerate(piece.offsets):
            got = made.rows(number, place, INDICES[indices])
            want = each.tensor[INDICES[indices]]
            assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
            assert torch.equal(got.reshape(-1, 1).view(torch.uint8), want.reshape(-1, 1).contiguous().view(torch.uint8))
            num_tables += 1
    assert num_tables == len(tables.state_dict())


@pytest.mark.parametrize("index", [-1, 50, -(2**40), 2**40])
@pytest.mark.parametrize("name", ["plain", "transposed"])
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.sweep(share=0.15)
def test_rows_outside_of_the_table_are_refused_as_torch_does(home: str, name: str, index: int, tmp_path: Path) -> None:
    tables = Tables()
    weights = PackedWeights(tables)
    made = HOMES[home](weights, tmp_path)
    (number,) = weights.slices_of[id(getattr(tables, name))]
    indices = torch.tensor([3, index])
    with pytest.raises(IndexError) as plain:
        nn.functional.embedding(indices, getattr(tables, name))
    with pytest.raises(IndexError) as ours:
        made.rows(number, 0, indices)
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["plain", "transposed"])
def test_rows_of_a_file_truncated_at_any_moment_are_right_or_an_error(name: str, seed: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    table = nn.Embedding(3000, 8).requires_grad_(False)
    save_file({"weight": table.weight}, path)
    if name == "transposed":
        table.weight.data = table.weight.view(8, 3000).t()
    rng = random.Random(seed)
    length, delay_s = rng.randrange(path.stat().st_size - PAGE), 0.02 * rng.random()
    indices = torch.arange(3000).flip(0)
    want = table.weight[indices]

    def look_up_until_it_fails() -> str:
        weights = PackedWeights(table)
        home = FileHome(weights, in_files(weights, [path], tmp_path), None)
        threading.Timer(delay_s, os.truncate, (path, length)).start()
        while True:
            try:
                rows = home.rows(0, 0, indices)
            except DiskError as error:
                return str(error)
            if not torch.equal(rows, want):
                return "other rows"

    assert "model.safetensors: the file was changed" in run_isolated(look_up_until_it_fails)


# ------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("mode", ["swap", "stream"])
@pytest.mark.parametrize("when", ["between visits", "in a visit", "after a prefetch"])
def test_a_file_that_was_written_is_refused(
    sampler: Sampler, tokens: Tensor, mode: str, when: str, tmp_path: Path
) -> None:
    path = checkpoint(sampler, tmp_path)
    teacher = at_home_in_file(sampler, tmp_path, mode, files=[path])
    with teacher.onload() as module:
        module.sample(tokens, 1)
    times = path.stat()

    def write() -> None:
        time.sleep(0.02)  # file systems have clocks of some milliseconds
        with path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"12345678")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    if when == "after a prefetch":
        teacher.prefetch()
    if when != "in a visit":
        write()
    with pytest.raises(DiskError, match=r"model\.safetensors: the file was changed"), teacher.onload() as module:
        write()
    with pytest.raises(DiskError, match="was changed"), teacher.onload():
        pass
    assert teacher.report().device_bytes == 0


@pytest.mark.parametrize("mode", ["swap", "stream"])
def test_a_truncated_file_is_refused(sampler: Sampler, tokens: Tensor, mode: str, tmp_path: Path) -> None:
    path = checkpoint(sampler, tmp_path)
    length = path.stat().st_size
    teacher = at_home_in_file(sampler, tmp_path, mode, files=[path])
    os.truncate(path, length // 2)
    with pytest.raises(DiskError, match=r"model\.safetensors.*was changed.*KiB.*KiB now"), teacher.onload() as module:
        module.sample(tokens, 1)


def test_a_file_that_is_linked_or_deleted_is_read_on(network: Network, x: Tensor, tmp_path: Path) -> None:
    want = network(x)
    path = checkpoint(network, tmp_path)
    teacher = at_home_in_file(network, tmp_path, files=[path])
    for change in (lambda: os.link(path, tmp_path / "link"), path.unlink, (tmp_path / "link").unlink):
        change()
        with teacher.onload() as module:
            assert torch.equal(module(x), want)


@pytest.mark.parametrize("copier", ["none", "late"])
@pytest.mark.parametrize("mode", ["swap", "stream"])
@pytest.mark.sweep(share=0.4)
def test_the_next_visit_is_right_after_a_failed_read(
    sampler: Sampler, tokens: Tensor, copier: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = sampler.sample(tokens, 2)
    teacher = at_home_in_file(sampler, tmp_path, mode, copier=ALL_COPIERS[copier]())
    with teacher.onload() as module:
        module.sample(tokens, 2)
    reads = itertools.count()
    preadv = os.preadv
    fail_at = -1

    def failing(*arguments: object) -> int:
        if next(reads) == fail_at:
            raise OSError(5, "Input/output error")
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    with teacher.onload() as module:
        assert torch.equal(module.sample(tokens, 2), want)
    num_reads = next(reads)
    for number in range(0, num_reads, max(1, num_reads // 8)):
        reads, fail_at = itertools.count(), number
        with pytest.raises(DiskError, match=r"without a name.*reading .* from byte \d+ on failed: Input/output"):
            with teacher.onload() as module:
                module.sample(tokens, 2)
        fail_at = -1
        with teacher.onload() as module:
            assert torch.equal(module.sample(tokens, 2), want)
        assert teacher.report().device_bytes == 0
    assert num_reads >= 1


@pytest.mark.parametrize("mode", ["swap", "stream"])
@pytest.mark.sweep(share=0.5)
def test_the_next_visit_is_right_after_a_fault_in_any_copy(tokens: Tensor, mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sampler = Sampler(num_prefix=1, num_expert=1).eval().requires_grad_(False)
    want = sampler.sample(tokens, 1)
    counter = AdversarialCopier()
    teacher = at_home_in_file(copy.deepcopy(sampler), tmp_path, mode, copier=counter)
    for _ in range(3):
        with teacher.onload() as module:
            module.sample(tokens, 1)
    for fail_at in range(2, counter.num_operations, 11):  # the first one is the teacher's own
        copier = AdversarialCopier("random", fail_at=fail_at)
        teacher = at_home_in_file(copy.deepcopy(sampler), tmp_path, mode, copier=copier)
        faults = 0
        for _ in range(4):
            try:
                with teacher.onload() as module:
                    assert torch.equal(module.sample(tokens, 1), want)
            except InjectedError:
                faults += 1
            assert torch.equal(teacher.module.sample(tokens, 1), want)
        assert faults == 1
        assert teacher.report().device_bytes == copier.live_bytes == 0


def test_short_reads_are_continued(
    network: Network, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = nn.Linear(300, 300, bias=False).requires_grad_(False)
    want = big.weight.clone()
    teacher = at_home_in_file(big, tmp_path)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:PAGE]], offset))
    with teacher.onload() as module:
        assert torch.equal(module.weight, want)


def in_fork(check: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0


def test_a_fork_can_use_the_module_at_home_and_no_visit(network: Network, x: Tensor, tmp_path: Path) -> None:
    want = network(x)
    teacher = at_home_in_file(network, tmp_path)
    with teacher.onload() as module:
        assert torch.equal(module(x), want)

    def check() -> None:
        signal.alarm(20)
        assert torch.equal(teacher.module.transposed, state)
        with pytest.raises(DiskError, match=r"process \d+ has it open, of which this is a fork"), teacher.onload():
            pass

    state = network.transposed.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_fork(check)
    with teacher.onload() as module:
        assert torch.equal(module(x), want)


# ------------------------------------------------------------------------------------------------ memory


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts pages as Linux does")
def test_a_stream_holds_the_ring_and_nothing_between_visits(tmp_path: Path) -> None:
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))).requires_grad_(False)
    x = torch.randn(2, 1024)
    want = module(x)
    before = anonymous_bytes()
    teacher = OffloadedTeacher(module, device="cpu", mode="stream", home="file", files=(), disk=tmp_path)
    weights_bytes, mib = 16 * 4 * 2**20, 2**20
    seen: list[int] = []
    for layer in module:
        layer.register_forward_hook(lambda *_: seen.append(anonymous_bytes()))
    with torch.no_grad():
        for _ in range(3):
            seen.clear()
            with teacher.onload() as network:
                assert torch.equal(network(x), want)
    rest = anonymous_bytes()
    others = 8 * mib  # of the test process itself
    assert rest <= before - weights_bytes + teacher.report().host_bytes + others
    assert max(seen) <= rest + 8 * mib + others
    assert teacher.report().peak_device_bytes == 8 * mib


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"home": "disk"}, r"home='disk' is unknown; use one of host, file"),
        ({"files": []}, r"files=\[\].*for home='file' alone; leave them out"),
        ({"disk": "."}, r"disk='.'.*for home='file' alone; leave them out"),
        ({"home": "file", "disk": "gone"}, r"disk='gone' is no folder; name one on a local disk"),
    ],
)
def test_impossible_options_are_refused(network: Network, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadedTeacher(network, device="cpu", **options)


def test_auto_keeps_weights_in_memory_where_the_budget_has_room(network: Network, tmp_path: Path) -> None:
    fits = at_home_in_file(copy.deepcopy(network), tmp_path, "auto", budget_gib=1).report()
    assert (fits.mode, fits.home, fits.bytes_read) == ("resident", "cpu", 0)
    assert at_home_in_file(network, tmp_path, "auto", budget_gib=1e-7).report().mode == "stream"
