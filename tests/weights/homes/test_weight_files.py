"""Tests that weights are found in files by their bytes, and that a file of ours has those which are in no other."""

import copy
import errno
import mmap
import os
import random
import time
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import save_file
from teacher_files import at_home_in_file, checkpoint
from teacher_toys import Network
from torch import Tensor, nn

from hf_memopt.transfer.direct_io import private_pages
from hf_memopt.transfer.file_reader import PART_BYTES, BlockInFiles, ReadFile
from hf_memopt.transfer.scratch_file import DiskError
from hf_memopt.weights import OffloadedTeacher
from hf_memopt.weights.homes.home import FileHome
from hf_memopt.weights.homes.packed_weights import PackedWeights
from hf_memopt.weights.homes.weight_files import MappedMemory, in_files


def test_weights_come_from_the_file_that_holds_them_whatever_it_calls_them(
    network: Network, x: Tensor, tmp_path: Path
) -> None:
    want = network(x)
    weights = {f"renamed.{number}": each.clone() for number, each in enumerate(network.parameters())}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, tmp_path / "other.safetensors")
    teacher = at_home_in_file(network, tmp_path, files=[tmp_path])
    held = {piece.file.name for piece in teacher._at_home._block.pieces.values()}
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
    ours = [piece for piece in teacher._at_home._block.pieces.values() if "without a name" in piece.file.name]
    assert sum(piece.num_bytes for piece in ours) < 256  # the rotary frequencies, which no file has
    for _ in range(3):
        with teacher.onload() as module, torch.no_grad():
            assert torch.equal(module(tokens).logits, want)
    model.save_pretrained(tmp_path / "again")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("change", ["none", "a bit", "another file's name"])
def test_mapped_weights_are_compared_only_if_they_may_differ(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.safetensors"
    torch.manual_seed(0)
    save_file({"weight": torch.randn(300, 300)}, path)
    layer = nn.Linear(300, 300, bias=False).requires_grad_(False)
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    mapping = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    layer.weight.data = mapping[8 + header_bytes :].view(torch.float32).view(300, 300)
    if change == "a bit":
        layer.weight[-1, -1] += 1
    elif change == "another file's name":  # which has the same bytes at first
        path.rename(tmp_path / "old")
        save_file({"weight": layer.weight.clone().index_fill_(0, torch.tensor(299), 1.0)}, path)
    compared = []
    is_equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *pair: (compared.append(pair), is_equal(*pair))[1])
    block = in_files(PackedWeights(layer), [path], tmp_path)
    assert bool(compared) == (change != "none")
    (piece,) = block.pieces.values()
    pages = private_pages(PART_BYTES)
    got = piece.file.read(piece.position, piece.num_bytes, pages).view(torch.float32).view(300, 300)
    assert is_equal(got, layer.weight)
    assert (piece.file.name == str(path)) == (change == "none")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux lists mapped files")
def test_files_whose_names_are_no_text_are_mapped_memory_too(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xe2\x80\xa8.safetensors"))  # of two lines
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_COPY)
    found = MappedMemory().range_of(torch.frombuffer(mapping, dtype=torch.uint8))
    assert found is not None
    assert (found.path, found.position, found.is_written) == (path, 0, False)


def test_nothing_is_left_in_the_folder(network: Network, tmp_path: Path) -> None:
    teacher = at_home_in_file(network, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert teacher._at_home.file_bytes > 0


def test_a_full_disk_names_folder_and_bytes(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskError, match=rf"disk={tmp_path}: writing .*KiB of weights failed: No space"):
        at_home_in_file(network, tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 64])
def test_other_files_than_safetensors_are_refused(network: Network, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"weights\.bin is no safetensors file"):
        at_home_in_file(network, tmp_path, files=[tmp_path / "weights.bin"])


# ------------------------------------------------------------------------------------------------ damaged files

DATA = bytes(range(64))
HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{what}",
    "not UTF-8": b'{"\xff\xfe": 1}',
    "deep": b'{"a": ' + b"[" * 200_000,
    "a list": b"[]",
    "a number of 5,000 digits": b'{"a": {"data_offsets": [0, ' + b"1" * 5_000 + b"]}}",
    "a tensor that is a list": b'{"a": [1]}',
    "no offsets": b'{"a": {"dtype": "U8", "shape": [64]}}',
    "offsets in words": b'{"a": {"data_offsets": ["0", "64"]}}',
    "offsets that are fractions": b'{"a": {"data_offsets": [0, 64.0]}}',
    "offsets that are no numbers": b'{"a": {"data_offsets": [NaN, Infinity]}}',
    "one offset": b'{"a": {"data_offsets": [64]}}',
    "offsets in the header": b'{"a": {"data_offsets": [-8, 64]}}',
    "offsets swapped": b'{"a": {"data_offsets": [64, 0]}}',
    "offsets behind the file": b'{"a": {"data_offsets": [0, 65]}}',
    "offsets of 80 bits": b'{"a": {"data_offsets": [604462909807314587353088, 604462909807314587353152]}}',
    "a name of two lines": b'{"a\\nb": {}}',
}


def block_of(layer: nn.Module, path: Path) -> BlockInFiles:
    return in_files(PackedWeights(layer), [path], path.parent)


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("given", ["the file", "its folder"])
def test_a_damaged_header_is_one_line_that_names_the_file(header: str, given: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(HEADERS[header]).to_bytes(8, "little") + HEADERS[header] + DATA)
    with pytest.raises(
        ValueError, match=r"^files: .*model\.safetensors is no safetensors file.*copy it again$"
    ) as error:
        in_files(PackedWeights(nn.Linear(4, 4)), [path if given == "the file" else tmp_path], tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", b"\x01" + bytes(7), bytes(7) + b"\x80" + DATA, b"\xff" * 72],
    ids=["nothing", "3 bytes", "1 of 0", "2^63 of 64", "2^64 of 64"],
)
def test_a_header_longer_than_its_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors .*its header would take \d+; name the checkpoint's"):
        block_of(nn.Linear(4, 4), path)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sweep(share=0.15)
def test_random_damage_gives_the_weights_or_names_the_file(seed: int, tmp_path: Path) -> None:
    path, rng = tmp_path / "model.safetensors", random.Random(seed)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).requires_grad_(False)
    save_file(layers.state_dict(), path)
    whole, refusals = path.read_bytes(), []
    for kind in ("end", "length", "header", "data"):
        damaged, header_end = bytearray(whole), 8 + int.from_bytes(whole[:8], "little")
        if kind == "end":
            del damaged[rng.randrange(len(damaged)) :]
        elif kind == "length":
            damaged[:8] = rng.choice([0, 1, header_end - 9, header_end - 7, rng.randrange(9000)]).to_bytes(8, "little")
        else:
            begin, end = (8, header_end) if kind == "header" else (header_end, len(whole))
            for _ in range(rng.randint(1, 8)):
                damaged[rng.randrange(begin, end)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            home = FileHome(weights := PackedWeights(layers), block_of(layers, path), None)
        except ValueError as error:
            refusals.append(str(error))
            continue
        for piece, views in zip(weights.slices, home.views, strict=True):
            assert all(torch.equal(view, each.tensor) for view, each in zip(views, piece.offsets, strict=True))
    assert all(str(path) in refusal for refusal in refusals)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "nothing", "a link to nothing"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a link to nothing":
        path.symlink_to("gone")
    with pytest.raises(ValueError, match=r"files: .*model\.safetensors is no (safetensors file|folder of safetensors)"):
        block_of(nn.Linear(4, 4), path)


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_a_file_that_cannot_be_opened_is_named(
    network: Network, reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = checkpoint(network, tmp_path), Path.open

    def refused(self: Path, *arguments: Any, **options: Any) -> IO[Any]:
        if self == path:
            raise OSError(reason, os.strerror(reason), str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(DiskError, match=rf"{path}: cannot be opened: {os.strerror(reason)}; let this process read it"):
        block_of(network, path)


def test_a_file_that_is_written_while_weights_are_sought_is_refused(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(network, tmp_path)
    remember = ReadFile.remember

    def written_before(self: ReadFile) -> None:
        time.sleep(0.02)  # file systems have clocks of some milliseconds
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"12345678")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        remember(self)

    monkeypatch.setattr(ReadFile, "remember", written_before)
    with pytest.raises(DiskError, match=r"model\.safetensors: the file was changed"):
        block_of(network, path)


def test_a_file_that_becomes_shorter_before_it_is_mapped_is_refused(network: Network, tmp_path: Path) -> None:
    path = checkpoint(network, tmp_path)
    weights = PackedWeights(network)
    block = in_files(weights, [path], tmp_path)
    os.truncate(path, 100)
    with pytest.raises(DiskError, match=r"model\.safetensors: the file was changed.* 100 B now"):
        FileHome(weights, block, None)
