"""Tests of the user's own fields: formats, names of arrays, channels, dimensions, and their refusals."""

import gc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from late_imports import LateModule
from torch import Tensor

from hf_memopt.recipes.neural_operator.options import DataOptions

data = LateModule("hf_memopt.recipes.neural_operator.data")
files = LateModule("hf_memopt.recipes.neural_operator.data")

NUM = 6
CPU = torch.device("cpu")


def fields(*shape: int) -> Tensor:
    return torch.randn(NUM, *shape, generator=torch.Generator().manual_seed(len(shape)))


def write(folder: Path, x: Any, y: Any, names: tuple[str, str] = ("x", "y"), kind: str = "pt") -> Path:
    arrays = dict(zip(names, (x, y), strict=True))
    for split in ("train", "test"):
        file = folder / f"darcy_{split}_16.{kind}"
        if kind == "pt":
            torch.save(arrays, file)
        elif kind == "npz":
            np.savez(file, **arrays)
        elif kind == "npy":
            for name, array in arrays.items():
                np.save(folder / f"darcy_{split}_16_{name}.npy", array)
        else:
            with h5py.File(file, "w") as opened:
                for name, array in arrays.items():
                    opened[name] = array
    return folder


def load(folder: Path, modes: int = 4, **more: Any) -> Any:
    options = DataOptions(data_folder=str(folder), test_resolutions=[16], num_train=4, num_test=2, **more)
    return data.load(options, CPU, modes)


@pytest.mark.parametrize("names", [("x", "y"), ("a", "u")])
@pytest.mark.parametrize("kind", ["pt", "h5", "hdf5", "npz", "npy"])
def test_every_format_gives_the_same_fields(kind: str, names: tuple[str, str], tmp_path: Path) -> None:
    x, y = fields(3, 16, 12).double(), fields(16, 12)
    found = load(write(tmp_path, x, y, names, kind), input_key=names[0], output_key=names[1])
    assert len(found.train) == 4
    assert len(found.tests[16]) == 2
    sample = found.train[1]
    assert torch.equal(sample["x"], x[1].float())
    assert torch.equal(sample["y"], y[1][None])
    assert found.shape == (3, 1, (16, 12))
    assert str(found.shape) == "3 to 1 channels on 16 x 12"


@pytest.mark.parametrize(
    ("x", "y", "more", "shape"),
    [
        ((16, 16), (16, 16), {}, (1, 1, (16, 16))),
        ((16, 24), (16, 24), {}, (1, 1, (16, 24))),
        ((1, 16, 16), (1, 16, 16), {}, (1, 1, (16, 16))),
        ((3, 16, 16), (2, 16, 16), {}, (3, 2, (16, 16))),
        ((3, 16, 16), (3, 16, 16), {}, (3, 3, (16, 16))),  # 3 is too short for 4 modes
        ((16, 16, 16), (16, 16, 16), {"num_dims": 3}, (1, 1, (16, 16, 16))),
        ((16, 16, 16), (16, 16, 16), {"num_dims": 2}, (16, 16, (16, 16))),
        ((2, 8, 16, 16), (8, 16, 16), {}, (2, 1, (8, 16, 16))),
        ((64,), (64,), {}, (1, 1, (64,))),
        ((2, 64), (64,), {}, (2, 1, (64,))),
        ((1, 64), (1, 64), {}, (1, 1, (64,))),
    ],
)
def test_channels_and_dimensions_are_told_apart(
    x: tuple[int, ...], y: tuple[int, ...], more: dict[str, int], shape: Any, tmp_path: Path
) -> None:
    found = load(write(tmp_path, fields(*x), fields(*y)), **more)
    assert found.shape == shape
    assert found.train[0]["x"].shape == (shape[0], *shape[2])
    assert found.train[0]["y"].shape == (shape[1], *shape[2])


def test_numbers_of_any_real_kind_become_float32(tmp_path: Path) -> None:
    found = load(write(tmp_path, fields(16, 16) > 0, torch.randint(0, 9, (NUM, 16, 16))))
    assert found.train[0]["x"].dtype == found.train[0]["y"].dtype == torch.float32
    assert found.processor.out_normalizer.std.shape == (1, 1, 1, 1)


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "complex": (fields(16, 16).to(torch.cfloat), fields(16, 16), {}, r"darcy_train_16.pt: 'x' is complex; store real"),
    "other grids": (fields(16, 16), fields(32, 32), {}, r"x 4x16x16 and y 4x32x32 are no fields on one grid"),
    "either": (fields(16, 16, 16), fields(16, 16, 16), {}, r"may be fields of 2 or 3 dimensions; pass --num_dims"),
    "not of these dimensions": (fields(16, 16), fields(16, 16), {"num_dims": 3}, r"no fields on one grid of 3 dim"),
    "coarse": (
        fields(8, 8),
        fields(8, 8),
        {"modes": 12},
        r"modes=12: the grid of .*16.pt, 8 x 8, has no.*8 at",
    ),
    "one side coarse": (fields(16, 8), fields(16, 8), {"modes": 12}, r"modes=12: the grid of .*, 16 x 8, has no"),
    "another key": (
        fields(16, 16),
        fields(16, 16),
        {"input_key": "a"},
        r"input_key='a': .*16.pt holds x, y; pass",
    ),
    "few": (fields(16, 16)[:3], fields(16, 16)[:3], {}, r"num_train=4: a file in data_folder='.*' has 3 samples"),
    "fewer solutions": (
        fields(16, 16),
        fields(16, 16)[:3],
        {},
        r"num_train=4: a file in data_folder='.*' has 3 samples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_fields_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    x, y, more, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, x, y), **more)


def test_tests_have_the_channels_of_the_training_data(tmp_path: Path) -> None:
    write(tmp_path, fields(16, 16), fields(16, 16))
    torch.save({"x": fields(3, 16, 16), "y": fields(16, 16)}, tmp_path / "darcy_test_16.pt")
    with pytest.raises(ValueError, match="darcy_test_16 has 3 to 1 channels on 16 x 16, and the training data 16 x 16"):
        load(tmp_path)


def test_a_file_without_names_is_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        torch.save([fields(16, 16)], tmp_path / f"darcy_{split}_16.pt")
    with pytest.raises(ValueError, match=r"darcy_train_16.pt holds a list; store a dictionary of tensors"):
        load(tmp_path)


def test_numbers_that_are_not_finite_are_told_before_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    y = fields(16, 16)
    y[2, 0, 0] = float("nan")
    load(write(tmp_path, fields(16, 16), y))
    assert "darcy_train_16: y is not finite in 1 of 4 samples, first in sample 2" in caplog.text


def test_plans_know_the_shape(tmp_path: Path) -> None:
    options = DataOptions(data_folder=str(write(tmp_path, fields(3, 16, 12), fields(16, 12))))
    assert data.shape_of(options, 4) == (3, 1, (16, 12))
    assert data.shape_of(DataOptions(resolution=20), 4) == (1, 1, (20, 20))


def linked(opened: Any, other: Path) -> None:
    opened["x"] = h5py.ExternalLink(other, "x")


def linked_group(opened: Any, other: Path) -> None:
    opened["g"] = h5py.ExternalLink(other, "/")
    opened["x"] = h5py.SoftLink("/g/x")


def linked_deep(opened: Any, other: Path) -> None:
    opened["a/b/c"] = h5py.ExternalLink(other, "x")
    opened["x"] = h5py.SoftLink("/a/b/c")


def virtual(opened: Any, other: Path) -> None:
    layout = h5py.VirtualLayout((NUM, 16, 16), "f4")
    layout[:] = h5py.VirtualSource(other, "x", (NUM, 16, 16))
    opened.create_virtual_dataset("x", layout)


def raw(opened: Any, other: Path) -> None:
    opened.create_dataset("x", (NUM, 16, 16), "f4", external=[(other, 0, h5py.h5f.UNLIMITED)])


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("write_x", [linked, linked_group, linked_deep, virtual, raw])
def test_numbers_in_other_files_are_refused(write_x: Any, is_there: bool, tmp_path: Path) -> None:
    other = tmp_path / "other.h5"
    if is_there:
        with h5py.File(other, "w") as opened:
            opened["x"] = np.ones((NUM, 16, 16), np.float32)
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        with h5py.File(tmp_path / "data" / f"darcy_{split}_16.h5", "w") as opened:
            opened["y"] = np.ones((NUM, 16, 16), np.float32)
            write_x(opened, other)
    with pytest.raises(
        ValueError, match=r"_16.h5 cannot be read \(ValueError: the numbers of '[xgabc/]+' lie elsewhere: .*; store"
    ):
        load(tmp_path / "data")


def test_groups_links_and_compression_within_a_file_are_read(tmp_path: Path) -> None:
    for split in ("train", "test"):
        with h5py.File(tmp_path / f"darcy_{split}_16.h5", "w") as opened:
            opened.create_dataset("a/u", data=np.ones((NUM, 16, 16)), chunks=(1, 16, 16), compression="gzip")
            opened["a/again"], opened["linked"] = opened["a"], h5py.SoftLink("/a/u")
    assert load(tmp_path, input_key="a/u", output_key="linked").shape == (1, 1, (16, 16))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("kind", ["meta", "quantised"])
def test_tensors_without_numbers_are_refused(kind: str, tmp_path: Path) -> None:
    array = torch.ones(NUM, 16, 16)
    hollow = array.to("meta") if kind == "meta" else torch.quantize_per_tensor(array, 1.0, 0, torch.qint8)
    write(tmp_path, hollow, array)
    with pytest.raises(ValueError, match=r"darcy_train_16\.pt cannot be read \(TypeError: 'x' holds no numbers"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numpy leaves a damaged file open
@pytest.mark.parametrize("kind", ["pt", "h5", "npz", "npy"])
@pytest.mark.parametrize("defect", ["objects", "truncated", "of another kind", "structured"])
def test_what_holds_no_numbers_is_one_line_that_names_the_file(kind: str, defect: str, tmp_path: Path) -> None:
    array: Any = np.ones((NUM, 16, 16))
    if defect == "objects":
        array = np.array(["a"] * NUM, dtype=object if kind != "h5" else h5py.string_dtype())
    elif defect == "structured":
        array = np.zeros((NUM, 16), [("a", "f4"), ("b", "i4")])
    write(tmp_path, array, array, kind=kind)
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        file.write_bytes({"truncated": content[: len(content) // 3], "of another kind": b"{}"}.get(defect, content))
    with pytest.raises(ValueError, match=rf"darcy_train_16\w*\.{kind} cannot be read \(") as caught:
        load(tmp_path)
    assert not any(part in str(caught.value) for part in ("\n", "\x1b", "weights_only=False"))
    del caught
    gc.collect()


def test_a_group_is_no_field(tmp_path: Path) -> None:
    for split in ("train", "test"):
        with h5py.File(tmp_path / f"darcy_{split}_16.h5", "w") as opened:
            opened["x/a"], opened["y"] = np.ones(3), np.ones((NUM, 16, 16))
    with pytest.raises(ValueError, match=r"darcy_train_16.h5 cannot be read \("):
        load(tmp_path)
