"""Datasets of the `datasets` library by name: folders that `save_to_disk` has written, other folders, or the hub."""

from pathlib import Path
from typing import Any


def dataset_by_name(name: str, split: str, config: str | None = None, *, streaming: bool = False) -> Any:
    """Return one split of a dataset; of a saved one without splits, all of it.

    Raises:
        ValueError: a saved dataset has no such split.
    """
    import datasets  # takes a second

    if not any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
        return datasets.load_dataset(name, config, split=split, streaming=streaming, trust_remote_code=False)
    found = datasets.load_from_disk(name)
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"split={split!r}: it has {', '.join(found)}")
        found = found[split]
    return found.to_iterable_dataset() if streaming else found
