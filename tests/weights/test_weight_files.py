"""Tests that weights are found in files by their bytes, and that a file of ours has those which are in no other."""

import copy
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from teacher_files import at_home_in_file, checkpoint
from teacher_toys import Network
from torch import Tensor, nn

from hf_memopt.transfer.direct_io import private_pages
from hf_memopt.transfer.file_reader import PART_BYTES
from hf_memopt.transfer.scratch_file import DiskError
from hf_memopt.weights import OffloadedTeacher
from hf_memopt.weights.packed_weights import PackedWeights
from hf_memopt.weights.weight_files import in_files


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


def test_nothing_is_left_in_the_folder(network: Network, tmp_path: Path) -> None:
    teacher = at_home_in_file(network, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert teacher._files.num_bytes > 0


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
