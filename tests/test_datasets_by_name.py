"""Tests of datasets by name: of the safe kinds, and refused where they would run code or read files elsewhere."""

import gzip
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from late_imports import LateModule
from PIL import Image
from pyarrow import parquet

datasets = LateModule("datasets")
packaged_modules = LateModule("datasets.packaged_modules")
datasets_by_name = LateModule("hf_memopt.datasets_by_name")

# Of datasets 4.8.
LOADERS = {"arrow", "audiofolder", "cache", "csv", "eval", "generator", "hdf5", "imagefolder", "json", "lance", "spark"}
LOADERS |= {"niftifolder", "pandas", "parquet", "pdffolder", "sql", "text", "videofolder", "webdataset", "xml"}
SECRET = "hidden"
# The library leaves tables of CSV open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Boom:
    """An object that makes a folder when unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a pickle that runs code; beside it lies a folder with files of others."""
    place, outside = tmp_path / "place", tmp_path / "outside"
    for each in (place / "rows", outside):
        each.mkdir(parents=True)
    (place / "train.pkl").write_bytes(pickle.dumps(Boom()))
    (outside / "train.txt").write_text(SECRET)
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(outside / "a.png")
    monkeypatch.chdir(place)
    return place


def dataset_by_name(name: str, *more: Any, **how: Any) -> Any:
    return datasets_by_name.dataset_by_name(name, *more, **how)


def test_all_loaders_are_tested() -> None:
    assert set(packaged_modules._PACKAGED_DATASETS_MODULES) <= LOADERS


def refusal(name: str, **how: Any) -> str:
    """Return the one line with which a dataset is refused, when it is loaded or when its rows are read."""
    with pytest.raises(ValueError, match=r"cannot be loaded|lies outside") as caught:
        list(dataset_by_name(name, "train", **how))
    assert not Path("ran").exists()
    assert SECRET not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", sorted(LOADERS))
def test_loaders_of_the_library_are_no_datasets(name: str, streaming: bool) -> None:
    assert f"dataset={name!r} cannot be loaded: a loader of the datasets library" in refusal(name, streaming=streaming)


@pytest.mark.parametrize(
    "name",
    ["http://x.y/a.csv", "zip://a.csv::a.zip", "hf://datasets/a/b", "file:///etc/passwd", "buckets/a/b", "/dev/zero"],
)
def test_names_are_hub_ids_folders_or_files(name: str) -> None:
    assert refusal(name).startswith(f"dataset={name!r} cannot be loaded: ")


def metadata(text: str) -> Callable[[Path], None]:
    def write(rows: Path) -> None:
        (rows / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {text}\n---\n")
        (rows / "train.txt").write_text("inside")

    return write


def standalone(rows: Path) -> None:
    (rows / ".huggingface.yaml").write_text("configs:\n- {config_name: default, data_files: ../../outside/train.txt}\n")
    (rows / "train.txt").write_text("inside")


def linked(name: str, target: str) -> Callable[[Path], None]:
    return lambda rows: (rows / name).symlink_to(Path(target).resolve())


def a_pickle(rows: Path) -> None:
    (rows / "train.pkl").write_bytes(pickle.dumps(Boom()))


def zipped(rows: Path) -> None:
    with zipfile.ZipFile(rows / "train.zip", "w") as archive:
        archive.write("train.pkl")


def a_script(rows: Path) -> None:
    (rows / "rows.py").write_text("import os; os.mkdir('ran')")
    (rows / "train.txt").write_text("inside")


def saved(change: dict[str, Any]) -> Callable[[Path], None]:
    def write(rows: Path) -> None:
        for folder in (rows, Path("../outside/saved")):
            datasets.Dataset.from_dict({"text": [SECRET]}).save_to_disk(folder)
        state = json.loads((rows / "state.json").read_text())
        (rows / "state.json").write_text(json.dumps(state | change))

    return write


def saved_splits(rows: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": [SECRET]})}).save_to_disk("../outside/splits")
    (rows / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (rows / "train").symlink_to(Path("../outside/splits/train").resolve())


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "above": (metadata("data_files: ../../outside/train.txt"), "lies outside of the dataset"),
    "absolute": (metadata("data_files: /etc/passwd"), "'/etc/passwd' lies outside of the dataset"),
    "escapes": (metadata(r'data_files: "/\e[31m"'), r"'/\x1b[31m' lies outside of the dataset"),
    "everything": (metadata("data_files: /**"), "lies outside"),
    "of a split": (metadata("data_files:\n  - {split: train, path: [/etc/passwd]}"), "lies outside"),
    "folder": (metadata("data_dir: ../../outside"), "lies outside"),
    "absolute folder": (metadata("data_dir: /etc"), "lies outside"),
    "chain": (metadata("data_files: file:///etc/passwd"), "lies outside"),
    "archive": (metadata("data_files: zip://*::/etc/a.zip"), "lies outside"),
    "address": (metadata("data_files: http://127.0.0.1:9/a.csv"), "lies outside"),
    "hub": (metadata("data_files: hf://datasets/a/b/c.csv"), "lies outside"),
    "pickle by metadata": (metadata("data_files: train.pkl\n  builder_name: pandas"), "train.pkl"),
    "standalone": (standalone, "lies outside of the dataset"),
    "link": (linked("train.txt", "../outside/train.txt"), "lies outside"),
    "linked folder": (linked("train", "../outside"), "cannot be loaded"),
    "pickle": (a_pickle, "cannot be loaded"),
    "zipped pickle": (zipped, "cannot be loaded"),
    "script": (a_script, "scripts are no longer supported"),
    "hdf5": (lambda rows: (rows / "train.h5").touch(), "files of the kind 'hdf5' are not read; pass a dataset of"),
    "tar": (lambda rows: (rows / "train.tar").touch(), "files of the kind 'webdataset' are not read"),
    "bad infos": (lambda rows: (rows / "dataset_infos.json").write_text("[" * 100_000), "cannot be loaded"),
    "saved elsewhere": (
        saved({"_data_files": [{"filename": "../../outside/saved/data-00000-of-00001.arrow"}]}),
        "lies",
    ),
    "saved in a word": (saved({"_data_files": 7}), "cannot be loaded"),
    "splits elsewhere": (saved_splits, "lies outside"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_folders_are_refused(kind: str, place: Path) -> None:
    write, said = HOSTILE[kind]
    write(place / "rows")
    for streaming in (False, True):
        assert said in refusal("rows", streaming=streaming)


@pytest.mark.parametrize("pattern", ["/etc/passwd", "../../other/b/a.txt", "http://127.0.0.1:9/a.txt", "/**"])
def test_metadata_on_the_hub_names_files_of_its_own_repository_alone(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def factory(path: str, **options: Any) -> Any:
        from datasets import data_files

        return data_files.DataFilesDict.from_patterns({"train": [pattern]}, base_path=f"hf://datasets/{path}@0")

    monkeypatch.setattr("datasets.load.dataset_module_factory", factory)
    assert "lies outside of the dataset" in refusal("somebody/rows")


def in_a_table(rows: Path, path: str) -> None:
    features = datasets.Features({"image": datasets.Image()})
    table = datasets.Dataset.from_dict({"image": [{"bytes": None, "path": path}]}, features=features).data.table
    parquet.write_table(table, rows / "a.parquet")


def beside_metadata(rows: Path, path: str) -> None:
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(rows / "own.png")
    (rows / "metadata.csv").write_text(f"file_name\n{path}\n")


def in_a_column(rows: Path, path: str) -> None:
    (rows / "a.csv").write_text(f"image\n{path}\n")


@pytest.mark.parametrize(
    ("write", "streaming"),
    [(in_a_table, False), (in_a_table, True), (beside_metadata, False), (beside_metadata, True), (in_a_column, False)],
)
def test_images_are_files_of_the_dataset(write: Callable[..., None], streaming: bool, place: Path) -> None:
    for path in ("../../outside/a.png", str(place.parent / "outside" / "a.png")):
        write(place / "rows", path)
        assert "a.png' lies outside of the dataset; copy it" in refusal(
            "rows", streaming=streaming, image_column="image"
        )
        (row,) = dataset_by_name("rows", "train", streaming=streaming)
        assert not isinstance(row["image"], Image.Image)


def rows_of(kind: str, rows: Path) -> str:
    table = datasets.Dataset.from_dict({"text": ["inside"]})
    file = rows / f"train.{kind}"
    if kind in ("csv", "jsonl", "parquet"):
        getattr(table, f"to_{kind.removesuffix('l')}")(file)
    elif kind == "tsv":
        file.write_text("text\tother\ninside\t1\n")
    elif kind == "txt":
        file.write_text("inside")
    elif kind == "txt.gz":
        file.write_bytes(gzip.compress(b"inside"))
    elif kind == "saved":
        table.with_format("numpy").save_to_disk(rows)
    else:
        datasets.DatasetDict({"train": table}).save_to_disk(rows)
    return str(file) if file.exists() else "./rows"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "txt", "txt.gz", "saved", "split"])
def test_files_and_folders_of_data_are_read(kind: str, streaming: bool, place: Path) -> None:
    file = rows_of(kind, place / "rows")
    for name in {file, "rows"}:
        (row,) = dataset_by_name(name, "train", streaming=streaming)
        assert row["text"] == "inside"


def test_metadata_names_configurations(place: Path) -> None:
    (place / "rows" / "b").mkdir()
    (place / "rows" / "b" / "x.txt").write_text("second")
    text = "data_files: train.txt\n- {config_name: b, data_dir: b}\n- {config_name: c, data_files: ../../outside/*}"
    metadata(text)(place / "rows")
    assert dataset_by_name("rows", "train")["text"] == ["inside"]
    assert dataset_by_name("rows", "train", "b")["text"] == ["second"]
    assert "lies outside of the dataset" in refusal("rows", config="c")


@pytest.mark.parametrize("streaming", [False, True])
def test_images_of_a_folder_and_links_in_the_hubs_cache(streaming: bool, place: Path) -> None:
    blobs, snapshot = place / "hub" / "blobs", place / "hub" / "snapshots" / "0"
    for each in (blobs, snapshot):
        each.mkdir(parents=True)
    beside_metadata(snapshot, "own.png")
    (snapshot / "own.png").rename(blobs / "7")
    (snapshot / "own.png").symlink_to(blobs / "7")
    for how in ({}, {"kind": "imagefolder"}):
        (row,) = dataset_by_name(str(snapshot), "train", streaming=streaming, image_column="image", **how)
        assert row["image"].size == (2, 2)
    (blobs / "8").write_text("inside")
    (snapshot / "b.txt").symlink_to(blobs / "8")
    (row,) = dataset_by_name(str(snapshot / "b.txt"), "train", streaming=streaming)
    assert row == {"text": "inside"}


def test_values_stay_values() -> None:
    datasets.Dataset.from_dict(
        {"text": ["a"]}, features=datasets.Features({"text": datasets.Value("string")})
    ).to_parquet("rows/a.parquet")
    assert dataset_by_name("rows", "train").features == datasets.Features({"text": datasets.Value("string")})
