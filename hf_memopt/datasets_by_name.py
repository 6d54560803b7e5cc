"""Datasets of the `datasets` library by name. Nothing else calls that library's own loaders: some of them run code."""

import glob
import json
import os
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
from datasets import data_files, packaged_modules
from datasets.features.features import _visit
from datasets.utils.file_utils import SINGLE_FILE_COMPRESSION_EXTENSION_TO_PROTOCOL as _COMPRESSIONS
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.utils._validators import validate_repo_id

# "cache" is a dataset of the hub that was downloaded before, on a machine that is offline.
_KINDS = ("parquet", "arrow", "json", "csv", "text", "imagefolder", "cache")
# The library takes these names before folders and hub ids, and reads files of the current folder.
_LOADERS = {each.name for each in pkgutil.iter_modules(packaged_modules.__path__)}


@dataclass
class _OwnImage(datasets.Image):  # type: ignore[misc]
    """Images as bytes, or as files below one of `homes`."""

    homes: tuple[str, ...] = ()

    def decode_example(self, value: dict[str, Any], token_per_repo_id: Any = None) -> Any:
        _check_places(self.homes, [value["path"]] if value["bytes"] is None else [])
        return super().decode_example(value, token_per_repo_id)


def dataset_by_name(
    name: str,
    split: str,
    config: str | None = None,
    *,
    streaming: bool = False,
    field: str = "dataset",
    kind: str | None = None,
    image_column: str | None = None,
) -> Any:
    """Return a split of a hub id, a folder, also of `save_to_disk`, or a file; of one saved without splits, all of it.

    `field` is the flag that the name comes from. `kind` says which of a folder's files count, by default those of the
    most frequent kind. Only images in `image_column` are decoded; others are paths and bytes.

    Raises:
        ValueError: there is no such dataset or split, or it is more than data, or not all in one place.
    """
    try:
        rows, homes = _load(name, split, config, streaming, kind)
        for column, each in (rows.info.features or {}).items():
            rows.info.features[column] = _visit(each, _undecoded)
        if image_column is not None and image_column in (rows.column_names or [image_column]):
            rows = rows.cast_column(image_column, _OwnImage(homes=homes))
    except Exception as error:  # a forged file can raise anything
        raise ValueError(f"{field}={name!r} cannot be loaded: {error}") from error
    return rows


def _undecoded(feature: Any) -> Any:
    return replace(feature, decode=False) if hasattr(feature, "decode") else feature


def _load(name: str, split: str, config: str | None, streaming: bool, kind: str | None) -> tuple[Any, tuple[str, ...]]:
    place, root = Path(name), Path(name).resolve()
    source: dict[str, Any] = {"path": str(root), "name": config}
    homes: tuple[str, ...] = (f"{root}/",)
    if name in _LOADERS:
        raise ValueError(f"a loader of the datasets library; pass a hub id, a file or a folder (./{name} for one)")
    if (root / "state.json").is_file() or (root / "dataset_dict.json").is_file():
        rows = _saved(root, split)
        return rows.to_iterable_dataset() if streaming else rows, ()
    if place.is_file():
        *_, suffix = ("", *(each for each in place.suffixes if each[1:] not in _COMPRESSIONS))
        kind, more = packaged_modules._EXTENSION_TO_MODULE.get(suffix, (place.suffix, {}))
        _check_kind(kind)
        folder = place.parent.resolve()
        source = {"path": kind, "data_dir": str(folder), "data_files": glob.escape(place.name), **more}
        homes = (os.path.join(folder, ""), str(root))  # in the hub's cache, files are links to blobs
    elif place.is_dir():
        source = {"path": kind, "data_dir": str(root)} if kind else source
        if root.parent.name == "snapshots":  # of the hub's cache, where files are links to blobs
            homes += (f"{root.parents[1] / 'blobs'}/",)
    elif kind or place.is_absolute():
        raise ValueError("there is no such folder or file; pass one, or a hub id")
    else:
        validate_repo_id(name)
        source, homes = {"path": name, "name": config}, (f"hf://datasets/{name}@",)
    with patch.object(data_files, "resolve_pattern", partial(_resolved, homes, data_files.resolve_pattern)):
        builder = datasets.load_dataset_builder(**source)
    _check_kind(builder.name)
    # Tables hold their images. Archives and downloads lie in the caches.
    caches = [f"{Path(each).resolve()}/" for each in (datasets.config.HF_DATASETS_CACHE, HF_HUB_CACHE)]
    homes = (*homes, *caches) if builder.name in ("imagefolder", "cache") else ()
    if streaming:
        return builder.as_streaming_dataset(split), homes
    builder.download_and_prepare()
    return builder.as_dataset(split), homes


def _check_kind(kind: str) -> None:
    if kind not in _KINDS:
        raise ValueError(f"files of the kind {kind!r} are not read; pass a dataset of {', '.join(_KINDS[:-1])}")


def _resolved(homes: tuple[str, ...], resolve: Any, pattern: str, base_path: str, **how: Any) -> Any:
    """Find data files as the library does, patterns of a dataset's own metadata included, in the dataset alone."""
    _check_places(homes, [pattern if "://" in pattern else os.path.join(base_path, pattern)])
    found = resolve(pattern, base_path, **how)
    _check_places(homes, found)
    return found


def _check_places(homes: tuple[str, ...], places: Iterable[str]) -> None:
    for place in places:
        *archives, file = place.split("::") if "://" in place else [place]  # zip://file.csv::archive.zip
        real = file if "://" in file else os.path.realpath(file)
        is_within = real.startswith(homes) and ".." not in real.split("/")
        if not is_within or any(not each.startswith("zip://") for each in archives):
            raise ValueError(
                f"{place!r} lies outside of the dataset; copy it there, or images into the table, as bytes"
            )


def _saved(root: Path, split: str) -> datasets.Dataset:
    """Map what `save_to_disk` has written, without the format that it notes."""
    folder, index = root, root / "dataset_dict.json"
    if index.is_file():
        splits = json.loads(index.read_bytes())["splits"]
        if split not in splits:
            raise ValueError(f"split={split!r}: it has {', '.join(splits)}")
        folder = root / split
    files = [str(folder / each["filename"]) for each in json.loads((folder / "state.json").read_bytes())["_data_files"]]
    _check_places((f"{root}/",), files)
    return datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files])
