"""Tests that weights at home in files are bitwise those in host memory, in every mode, and take no memory there."""

import copy
import itertools
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adversarial_copier import COPIERS, AdversarialCopier, InjectedError
from safetensors.torch import save_file
from teacher_toys import WIDTH, Network, Sampler
from torch import Tensor, nn

from hf_memopt.transfer import Copier, file_reader
from hf_memopt.transfer.direct_io import PAGE
from hf_memopt.transfer.scratch_file import DiskError
from hf_memopt.weights import OffloadedTeacher

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


def checkpoint(module: nn.Module, folder: Path) -> Path:
    """Write a module's own file, as a trainer would."""
    path = folder / "model.safetensors"
    weights = {name: tensor for name, tensor in module.state_dict().items() if tensor.numel()}
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, path)
    return path


def at_home_in_file(module: nn.Module, folder: Path, mode: str = "swap", **options: object) -> OffloadedTeacher:
    options = {"device": "cpu", "files": (), "disk": folder, **options}
    return OffloadedTeacher(module, mode=mode, home="file", **options)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copier", ALL_COPIERS)
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
    assert teacher.report().device_bytes == 0


def test_only_looked_up_rows_of_an_embedding_travel(sampler: Sampler, tokens: Tensor, tmp_path: Path) -> None:
    teacher = at_home_in_file(sampler, tmp_path, "stream", device="cuda", copier=AdversarialCopier())
    before = 0
    for _ in range(3):
        before = teacher.report().bytes_read
        with teacher.onload() as module:
            module.sample(tokens, 2)
    unread = sampler.embedding.weight.nbytes + sampler.head.weight.nbytes
    all_bytes = sum(each.nbytes for each in itertools.chain(sampler.parameters(), sampler.buffers()))
    assert teacher.report().bytes_read - before < all_bytes - unread + 256 * 200


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


# ------------------------------------------------------------------------------------------------ which file


def test_weights_come_from_the_file_that_holds_them_whatever_it_calls_them(
    network: Network, x: Tensor, tmp_path: Path
) -> None:
    want = network(x)
    weights = {f"renamed.{number}": each.clone() for number, each in enumerate(network.parameters())}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, tmp_path / "other.safetensors")
    teacher = at_home_in_file(network, tmp_path, files=[tmp_path])
    held = {piece.file.name for piece in teacher._files.pieces.values()}
    assert held == {str(tmp_path / "other.safetensors"), f"a file without a name in {tmp_path}"}
    with teacher.onload() as module:
        assert torch.equal(module(x), want)


def test_a_file_with_the_names_and_other_bytes_is_not_read(network: Network, x: Tensor, tmp_path: Path) -> None:
    path = checkpoint(network, tmp_path)
    with torch.no_grad():
        network.embed.weight[-1, -1] += 1
    want = network(x)
    teacher = at_home_in_file(network, tmp_path, files=[path])
    with teacher.onload() as module:
        assert torch.equal(module(x), want)


def test_cast_weights_come_from_a_file_of_ours(network: Network, x: Tensor, tmp_path: Path) -> None:
    path = checkpoint(network, tmp_path)
    reference = OffloadedTeacher(copy.deepcopy(network), device="cpu", mode="swap", dtype=torch.float64)
    teacher = at_home_in_file(network, tmp_path, files=[path], dtype=torch.float64)
    with teacher.onload() as module, reference.onload() as plain:
        for got, want in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(got, want)


def test_mapped_weights_come_from_the_file_that_they_are_mapped_from(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(100, (2, 7))
    with torch.no_grad():
        want = model(tokens).logits
    teacher = OffloadedTeacher(model, device="cpu", mode="stream", home="file", disk=tmp_path)
    ours = [piece for piece in teacher._files.pieces.values() if "without a name" in piece.file.name]
    assert sum(piece.num_bytes for piece in ours) < 256  # the rotary frequencies, which no file has
    for _ in range(3):
        with teacher.onload() as module, torch.no_grad():
            assert torch.equal(module(tokens).logits, want)
    model.save_pretrained(tmp_path / "again")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_nothing_is_left_in_the_folder(network: Network, tmp_path: Path) -> None:
    teacher = at_home_in_file(network, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert teacher._files.num_bytes > 0


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
    for number in range(num_reads):
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
def test_the_next_visit_is_right_after_a_fault_in_any_copy(tokens: Tensor, mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sampler = Sampler(num_prefix=1, num_expert=1).eval().requires_grad_(False)
    want = sampler.sample(tokens, 1)
    counter = AdversarialCopier()
    teacher = at_home_in_file(copy.deepcopy(sampler), tmp_path, mode, copier=counter)
    for _ in range(3):
        with teacher.onload() as module:
            module.sample(tokens, 1)
    for fail_at in range(1, counter.num_operations, 3):
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


def test_a_full_disk_names_folder_and_bytes(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskError, match=rf"disk={tmp_path}: writing .*KiB of weights failed: No space"):
        at_home_in_file(network, tmp_path)


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
    # Threads have pages of their own, of 4 MiB each.
    assert rest <= before - weights_bytes + teacher.report().host_bytes + 4 * mib
    assert max(seen) <= rest + 8 * mib + 4 * mib
    assert teacher.report().peak_device_bytes == 8 * mib


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"home": "disk"}, r"home='disk' is unknown; use one of host, file"),
        ({"files": []}, r"files=\[\].*for home='file' alone; leave them out"),
        ({"disk": "."}, r"disk='.'.*for home='file' alone; leave them out"),
    ],
)
def test_impossible_options_are_refused(network: Network, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadedTeacher(network, device="cpu", **options)


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 64])
def test_other_files_than_safetensors_are_refused(network: Network, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"weights\.bin is no safetensors file"):
        at_home_in_file(network, tmp_path, files=[tmp_path / "weights.bin"])


def test_auto_keeps_weights_in_memory_where_the_budget_has_room(network: Network, tmp_path: Path) -> None:
    fits = at_home_in_file(copy.deepcopy(network), tmp_path, "auto", budget_gib=1).report()
    assert (fits.mode, fits.home, fits.bytes_read) == ("resident", "cpu", 0)
    assert at_home_in_file(network, tmp_path, "auto", budget_gib=1e-7).report().mode == "stream"
