"""Tests that digests change with all that they stand for, and with nothing else."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_memopt.disk.files_on_disk import files_sha256, sha256, weights_sha256


def test_a_digest_is_that_of_the_contents(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"contents")
    assert sha256(file) == hashlib.sha256(b"contents").hexdigest()


def test_a_digest_of_files_knows_their_names_and_contents(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text("same")
    before = files_sha256(files, tmp_path)
    assert files_sha256(files[::-1], tmp_path) == before
    files[1].write_text("else")
    assert files_sha256(files, tmp_path) != before
    files[1].write_text("same")
    assert files_sha256([files[0].rename(tmp_path / "c"), files[1]], tmp_path) != before


def make_module() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(3)


def flip_weight(module: nn.BatchNorm1d) -> None:
    module.weight.data[1] = -1


def move_buffer(module: nn.BatchNorm1d) -> None:
    assert module.running_mean is not None
    module.running_mean[2] = 1e-9


def rename_weight(module: nn.BatchNorm1d) -> None:
    module.register_parameter("scale", module.weight)
    module.weight = None  # type: ignore[assignment]


@pytest.mark.parametrize("change", [flip_weight, move_buffer, rename_weight, lambda module: module.bfloat16()])
def test_a_digest_of_weights_changes_with_each_parameter_and_buffer(
    change: Callable[[nn.BatchNorm1d], object],
) -> None:
    module = make_module()
    before = weights_sha256(module)
    assert weights_sha256(make_module()) == before
    with torch.no_grad():
        change(module)
    assert weights_sha256(module) != before
