"""A folder of couplings: Arrow shards that are complete or absent, and together a dataset of the `datasets` library."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Sequence, Value, load_from_disk
from datasets.arrow_writer import ArrowWriter

from hf_memopt.teacher.coupling_key import check_same

DESCRIPTION_FILE = "couplings.json"
STATE_FILE = "state.json"  # what `datasets.load_from_disk` reads first; written when all shards are there

Columns = Mapping[str, Any]


class CouplingFolder:
    """Writes and reads one cache. Shards may be written by any number of processes, in any order, each by one.

    A shard is `data-00002-of-00010.arrow`, and beside it a `.json` with its size and SHA-256, which is written last:
    a shard without it counts as absent. Files appear under their names whole and flushed to disk, so that a kill or a
    full disk costs at most the shard in flight.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def num_shards(self) -> int:
        """As described."""
        return int(self.description()["num_shards"])

    def begin(self, description: Mapping[str, Any]) -> None:
        """Create the folder for couplings of this description, or check that it holds such couplings already.

        Args:
            description: JSON-able; has `num_shards`.

        Raises:
            ValueError: it holds others; names the fields. Or it holds something else.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / DESCRIPTION_FILE).exists():
            foreign = [file.name for file in self.path.iterdir() if not file.name.startswith(".")]
            if foreign and DESCRIPTION_FILE not in foreign:
                raise ValueError(f"output={str(self.path)!r} holds other files ({foreign[0]}, …); name a new folder")
            _write_json(self.path / DESCRIPTION_FILE, description)
        check_same(self.path, self.description(), description)

    def description(self) -> dict[str, Any]:
        """What `begin` was given.

        Raises:
            ValueError: the folder holds no couplings.
        """
        file = self.path / DESCRIPTION_FILE
        try:
            described: dict[str, Any] = json.loads(file.read_bytes())
        except FileNotFoundError as error:
            raise ValueError(f"{self.path} holds no couplings: there is no {DESCRIPTION_FILE} in it") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is damaged ({error}); precompute the couplings again") from error
        return described

    def is_complete(self, shard: int) -> bool:
        """Whether a shard is there, of the length that it was written with."""
        data, note = self._data_file(shard), self._note_file(shard)
        return note.exists() and data.exists() and data.stat().st_size == json.loads(note.read_bytes())["num_bytes"]

    def write(self, shard: int, rows: Iterator[Columns], features: Features) -> None:
        """Write one shard from batches of columns; it appears when it is complete."""
        for draft in self.path.glob(f".{self._data_file(shard).stem}.*"):
            draft.unlink()  # of a process that was killed: a shard has one writer
        with _appearing(self._data_file(shard)) as draft:
            with ArrowWriter(features=features, path=str(draft)) as writer:
                for columns in rows:
                    writer.write_batch(columns)
                writer.finalize()
            note = {"num_bytes": draft.stat().st_size, "sha256": _sha256(draft)}
        _write_json(self._note_file(shard), note)

    def finish(self, features: Features) -> list[int]:
        """If all shards are there, make the folder a dataset. Any process may do so, also several at once.

        Returns:
            The shards that are still missing.
        """
        shards = range(self.num_shards)
        missing = [shard for shard in shards if not self.is_complete(shard)]
        if not missing:
            files = [{"filename": self._data_file(shard).name} for shard in shards]
            digests = [json.loads(self._note_file(shard).read_bytes())["sha256"] for shard in shards]
            _write_json(self.path / "dataset_info.json", {"features": features.to_dict()})
            _write_json(self.path / STATE_FILE, _dataset_state(files, digests))
        return missing

    def read(self) -> Dataset:
        """All rows, mapped from disk.

        Raises:
            ValueError: a shard is missing, truncated or damaged; names it. Costs one read of all shards.
        """
        for shard in range(self.num_shards):
            self._check(shard)
        if not (self.path / STATE_FILE).exists():
            raise ValueError(f"{self.path} is not finished; run the same `precompute` command again")
        return load_from_disk(str(self.path))

    def _check(self, shard: int) -> None:
        data, note = self._data_file(shard), self._note_file(shard)
        if not data.exists() or not note.exists():
            raise ValueError(f"{data} is missing: precompute did not finish; run the same command again")
        if not self.is_complete(shard) or json.loads(note.read_bytes())["sha256"] != _sha256(data):
            raise ValueError(f"{data} is truncated or damaged; delete it and run the same `precompute` command again")

    def _data_file(self, shard: int) -> Path:
        return self.path / f"data-{shard:05d}-of-{self.num_shards:05d}.arrow"

    def _note_file(self, shard: int) -> Path:
        return self._data_file(shard).with_suffix(".json")


def coupling_features(num_elements: int, with_observations: bool) -> Features:
    """The columns of a cache whose targets have `num_elements` elements."""
    columns = {
        "index": Value("int64"),
        "draw": Value("int32"),
        "noise_seed": Value("int64"),
        "observation_checksum": Value("int64"),
        "target": Sequence(Value("float32"), length=num_elements),
    }
    return Features({**columns, "observation": Value("binary")} if with_observations else columns)


def _dataset_state(files: list[dict[str, str]], digests: list[str]) -> dict[str, Any]:
    """What `datasets.Dataset.save_to_disk` writes beside its shards; the fingerprint is that of their contents."""
    return {
        "_data_files": files,
        "_fingerprint": hashlib.sha256("".join(digests).encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    with _appearing(file) as draft:
        draft.write_text(json.dumps(content, indent=2))


@contextmanager
def _appearing(file: Path) -> Iterator[Path]:
    """A draft beside `file` that takes its name once it is whole and on disk, and disappears on an error."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    os.close(handle)
    draft = Path(name)
    try:
        draft.chmod(0o644)
        yield draft
        _flush(draft)
        draft.replace(file)
        _flush(file.parent)
    finally:
        draft.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
