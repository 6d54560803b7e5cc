"""A folder of couplings: Arrow shards that are complete or absent, and together a dataset of the `datasets` library."""

import hashlib
import json
import os
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow
from datasets import Dataset, Features, Sequence, Value
from datasets.arrow_writer import ArrowWriter
from datasets.table import InMemoryTable, concat_tables
from tqdm import tqdm

from hf_memopt.disk.digests import sha256
from hf_memopt.disk.files_on_disk import not_written, put_in_place
from hf_memopt.disk.locks import WriterLock
from hf_memopt.lerobot.couplings.key import check_same

DESCRIPTION_FILE = "couplings.json"
STATE_FILE = "state.json"  # the file that `datasets.load_from_disk` reads first; written when all shards are there
INFO_FILE = "dataset_info.json"

Columns = Mapping[str, Any]

_AGAIN = "run the same `precompute` command again"


class CouplingFolder:
    """Writes and reads one cache. Shards may be written by any number of processes, in any order, each by one.

    couplings.json               the description given to `begin`, and its SHA-256
    data-00002-of-00010.arrow    a shard
    data-00002-of-00010.json     its note: its number, its size, its SHA-256, and that of the description
    state.json                   makes the folder a dataset; written when all shards are there

    The note is written after its shard: a shard counts as absent unless its note fits it and the description. Files get
    their names when they are whole and on disk, so that a kill or a full disk costs at most the shard in flight.

    Args:
        path: path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Of each shard that `read` has checked, the file's size and times then.
        self._checked: dict[int, os.stat_result] = {}
        # Of each shard, the number of the row after its last one.
        self._ends: list[int] = []

    @property
    def num_shards(self) -> int:
        """The number of shards, by the description."""
        return int(self.description["num_shards"])

    def begin(self, description: Mapping[str, Any]) -> None:
        """Create the folder for couplings of this description, or check that it holds such couplings already.

        A description that is missing or damaged is written again if all shards in the folder belong to it.

        Args:
            description: JSON-able; has `num_shards`.

        Raises:
            ValueError: it holds others; names the fields. Or it holds something else, or cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"output={str(self.path)!r} cannot be created ({error}); name another folder") from error
        try:
            found = self.description
        except _AbsentError:
            # Only a folder with nothing but shards of this very description may get its description back: others hold
            # other files, or couplings without a description.
            self._refuse_other_files(_digest(description))
            _write_json(self.path / DESCRIPTION_FILE, {**description, "sha256": _digest(description)})
            found = self.description
        check_same(self.path, found, description)

    @cached_property
    def description(self) -> dict[str, Any]:
        """Return the description that `begin` was given.

        Raises:
            ValueError: the folder holds no couplings, or the description is damaged.
        """
        file = self.path / DESCRIPTION_FILE
        if not os.path.lexists(file):
            raise _AbsentError(f"{self.path} holds no couplings: there is no {DESCRIPTION_FILE} in it; {_AGAIN}")
        described = _read_json(file)
        if described.pop("sha256", None) != _digest(described):
            raise _AbsentError(f"{file} is damaged, or of an older version of hf_memopt; {_AGAIN}")
        return described

    def incomplete(self, shards: Iterable[int]) -> list[int]:
        """Return those of some shards that are missing, damaged, or of other couplings. Reads all of them.

        Raises:
            ValueError: a file that cannot be read and is not to be replaced either, a folder for example; names it.
        """
        return [shard for shard in self._with_bar(shards) if not self._is_complete(shard)]

    def write(self, shard: int, rows: Iterator[Columns], features: Features) -> None:
        """Write one shard from batches of columns; it appears when it is complete.

        Raises:
            ValueError: another process writes this shard.
            OSError: the disk is full, for example: names the file and how many bytes are free.
        """
        file = self._data_file(shard)
        lock = WriterLock(self.path / f".lock-{file.stem}", str(file), "give each process a RANK of its own")
        lock.acquire()
        try:
            # The lock is ours, so other drafts of this shard are those of processes that were killed.
            for draft in self.path.glob(f".{file.stem}.*"):
                draft.unlink()
            with _appearing(file) as draft:
                with ArrowWriter(features=features, path=str(draft)) as writer:
                    # The teacher computes the rows here. Its errors are not those of the disk, so only the lines that
                    # write are watched.
                    for columns in rows:
                        with _writing(file):
                            writer.write_batch(columns)
                    with _writing(file):
                        writer.finalize()
                size, digest = draft.stat().st_size, sha256(draft)
            note = {"couplings": _digest(self.description), "shard": shard, "num_bytes": size, "sha256": digest}
            _write_json(self._note_file(shard), note)
        finally:
            lock.release()

    def finish(self, features: Features) -> list[int]:
        """Make the folder a dataset if all shards are there. Any process may do so, also several at once.

        Returns:
            The shards that are still missing. Reads all shards if none seems to be.
        """
        shards = range(self.num_shards)
        # Reading all shards takes long, and is of no use while others are still at work.
        missing = [shard for shard in shards if not self._seems_complete(shard)] or self.incomplete(shards)
        if not missing:
            files = [{"filename": self._data_file(shard).name} for shard in shards]
            digests = [self._note(shard)["sha256"] for shard in shards]
            _write_json(self.path / INFO_FILE, {"features": features.to_dict()})
            _write_json(self.path / STATE_FILE, _dataset_state(files, digests))
        return missing

    def read(self) -> Dataset:
        """Map all rows from disk: of the files that were checked, also if others take their names later.

        Raises:
            ValueError: a shard is missing, truncated, damaged or of other couplings; names it. Costs one read of all
                shards.
        """
        tables = [self._table(shard) for shard in self._with_bar(range(self.num_shards))]
        self._ends = list(accumulate(table.num_rows for table in tables))
        return Dataset(concat_tables(tables), fingerprint=_digest(self.description)[:16])

    def check_unchanged(self, rows: Iterable[int]) -> None:
        """Raise a ValueError if something was written into the files of some rows since `read` checked them."""
        for shard in {bisect_right(self._ends, row) for row in rows}:
            file = self._data_file(shard)
            if _was_written_into(file, self._checked[shard]):
                raise ValueError(f"{file} was changed while it was in use; start again, which checks all files anew")

    def _table(self, shard: int) -> InMemoryTable:
        """Return one shard, after reading all of it. The mapping outlives the file's name."""
        file, note = self._data_file(shard), self._note(shard)
        with _reading(file):
            # Before reading, so that writes meanwhile are noticed later.
            self._checked[shard] = file.stat()
            with pyarrow.memory_map(str(file)) as mapped:
                content = mapped.read_buffer()
        if content.size != note.get("num_bytes") or hashlib.sha256(content).hexdigest() != note.get("sha256"):
            raise _AbsentError(f"{file} is truncated or damaged: its .json has another size or SHA-256; {_AGAIN}")
        return InMemoryTable.from_buffer(content)

    def _note(self, shard: int) -> dict[str, Any]:
        """Return the notes about a shard, if it is this shard of these couplings."""
        file, note = self._data_file(shard), _read_json(self._note_file(shard))
        if note.get("couplings") != _digest(self.description):
            raise _AbsentError(
                f"{file} is not of the couplings that {DESCRIPTION_FILE} describes: its .json names another teacher's, "
                f"other data's or another specification's; {_AGAIN}"
            )
        if note.get("shard") != shard:
            raise _AbsentError(f"{file} is not shard {shard}: its .json says {note.get('shard')!r}; {_AGAIN}")
        return note

    def _is_complete(self, shard: int) -> bool:
        try:
            self._table(shard)
        except _AbsentError:
            return False
        return True

    def _seems_complete(self, shard: int) -> bool:
        """Judge a shard by its size and its note, without reading it."""
        try:
            with _reading(self._data_file(shard)):
                return bool(self._data_file(shard).stat().st_size == self._note(shard).get("num_bytes"))
        except _AbsentError:
            return False

    def _refuse_other_files(self, digest: str) -> None:
        """Raise a ValueError if there is a file here that is not of the couplings with this description's digest."""
        names = sorted(file.name for file in self.path.iterdir() if not file.name.startswith("."))
        for name in names:
            if name not in (DESCRIPTION_FILE, STATE_FILE, INFO_FILE) and self._owner_of(name) != digest:
                raise ValueError(
                    f"output={str(self.path)!r} holds other files ({name}, …); delete them, or name a new folder"
                )

    def _owner_of(self, name: str) -> Any:
        """Return the description's SHA-256 in the note beside a file of this name."""
        try:
            return _read_json((self.path / name).with_suffix(".json")).get("couplings")
        except _AbsentError:
            return None

    def _with_bar(self, shards: Iterable[int]) -> Iterable[int]:
        """Show a bar once checking them has taken ten seconds."""
        bar: Iterable[int] = tqdm(shards, desc=f"checking {self.path}", unit="shard", delay=10)
        return bar

    def _data_file(self, shard: int) -> Path:
        return self.path / f"data-{shard:05d}-of-{self.num_shards:05d}.arrow"

    def _note_file(self, shard: int) -> Path:
        return self._data_file(shard).with_suffix(".json")


class _AbsentError(ValueError):
    """A file is missing, damaged or of other couplings, and `precompute` mends it by writing it."""


def coupling_features(num_elements: int, with_observations: bool) -> Features:
    """Return the columns of a cache whose targets have `num_elements` elements."""
    columns = {
        "index": Value("int64"),
        "draw": Value("int32"),
        "noise_seed": Value("int64"),
        "observation_checksum": Value("int64"),
        "target": Sequence(Value("float32"), length=num_elements),
    }
    return Features({**columns, "observation": Value("binary")} if with_observations else columns)


def _dataset_state(files: list[dict[str, str]], digests: list[str]) -> dict[str, Any]:
    """Return the state file of `datasets.Dataset.save_to_disk`, with a fingerprint of the shards' contents."""
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


def _digest(description: Mapping[str, Any]) -> str:
    """SHA-256 of a description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _read_json(file: Path) -> dict[str, Any]:
    with _reading(file):
        content = file.read_bytes()
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _AbsentError(f"{file} is damaged ({error}); {_AGAIN}") from error
    if not isinstance(parsed, dict):
        raise _AbsentError(f"{file} is damaged (it is not a JSON object); {_AGAIN}")
    return parsed


def _was_written_into(file: Path, before: os.stat_result) -> bool:
    """Tell whether the file that was checked has been written into; another that has taken its name is no matter."""
    try:
        now = file.stat()
    except FileNotFoundError:
        return False
    written = (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)
    return os.path.samestat(now, before) and written


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn errors inside into ones that name the file and the remedy."""
    try:
        yield
    except FileNotFoundError as error:
        raise _AbsentError(f"{file} is missing: `precompute` did not finish; run the same command again") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error}): mend that or delete it, and {_AGAIN}") from error


@contextmanager
def _appearing(file: Path) -> Iterator[Path]:
    """Yield a draft beside `file`, which takes its name when it is whole and on disk, and disappears on an error."""
    # Several processes may write the description and the state at the same time; the last one wins, with equal bytes.
    draft = file.with_name(f".{file.name}-{uuid.uuid4().hex}")
    with _writing(file):
        draft.touch()
    try:
        yield draft
        with _writing(file):
            _put_in_place(draft, file)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Turn failures to write inside into an OSError that names `file` and the free bytes."""
    try:
        yield
    except OSError as error:
        raise not_written(file, error, f". Make room, and {_AGAIN}") from error


def _put_in_place(draft: Path, file: Path) -> None:
    try:
        put_in_place(draft, file)
    except IsADirectoryError as error:
        raise ValueError(f"{file} is a folder: delete it, and {_AGAIN}") from error
