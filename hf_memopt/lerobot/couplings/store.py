"""A folder of couplings: Arrow files of the `datasets` library, and their description, `couplings.json`."""

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
from typing import Any, NamedTuple

import pyarrow
from datasets import Dataset, Features, Sequence, Value, concatenate_datasets
from datasets.arrow_writer import ArrowWriter
from tqdm import tqdm

from hf_memopt.disk.files_on_disk import WriterLock, not_written, put_in_place

DESCRIPTION_FILE = "couplings.json"

Columns = Mapping[str, Any]

_FORMAT = "couplings 2"  # goes into all digests: files of another format count as damaged
_AGAIN = "run the same `precompute` command again"


class CouplingFolder:
    """Writes and reads one cache. Shards may be written by any number of processes, in any order, each by one.

    couplings.json                               the description given to `begin`, and its SHA-256
    data-00002-of-00010-2c26b46b68ffc68f.arrow   a shard

    A shard's name ends in the digest of the description, the shard's number and the file's contents: a file that is
    damaged, of other couplings or in another one's place has a name that does not fit, and the shard counts as absent.
    Files get their names when they are whole and on disk, so that a kill or a full disk costs at most the shard in
    flight.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Of each shard that `read` has checked: its file, and the number of the row after its last one.
        self._checked: list[_Shard] = []
        self._ends: list[int] = []

    def begin(self, description: Mapping[str, Any]) -> None:
        """Create the folder for couplings of this description, or check that it holds such couplings already.

        A description that is missing or damaged is written again if a shard in the folder belongs to it. Raises a
        ValueError that names the fields of other couplings, or if the folder holds something else or cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"output={str(self.path)!r} cannot be created ({error}); name another folder") from error
        try:
            found = self.description
        except _AbsentError:
            names = sorted(file.name for file in self.path.iterdir() if not file.name.startswith("."))
            others = [name for name in names if name != DESCRIPTION_FILE]
            # Those of which none is a shard of this description.
            if others and not any(self._is_complete(shard, description) for shard in range(description["num_shards"])):
                raise ValueError(
                    f"output={str(self.path)!r} holds other files ({others[0]}, …); delete them, or name a new folder"
                ) from None
            self._write_description(description)
            found = self.description
        check_same(self.path, found, description)

    @cached_property
    def description(self) -> dict[str, Any]:
        """The description that `begin` was given; ValueError if it is absent or damaged."""
        file = self.path / DESCRIPTION_FILE
        if not os.path.lexists(file):
            raise _AbsentError(f"{self.path} holds no couplings: there is no {DESCRIPTION_FILE} in it; {_AGAIN}")
        with _reading(file):
            content = file.read_bytes()
        try:
            described = dict(json.loads(content))
        except (ValueError, TypeError, RecursionError) as error:
            raise _AbsentError(f"{file} is damaged ({error}); {_AGAIN}") from error
        if described.pop("sha256", None) != _digest(described):
            raise _AbsentError(f"{file} is damaged, or of an older version of hf_memopt; {_AGAIN}")
        return described

    def incomplete(self, shards: Iterable[int]) -> list[int]:
        """Return those of some shards that are absent, after reading all; ValueError where a file cannot be read."""
        return [shard for shard in self._with_bar(shards) if not self._is_complete(shard, self.description)]

    def write(self, shard: int, rows: Iterator[Columns], features: Features) -> None:
        """Write one shard from batches of columns, whole or not at all; ValueError if another process writes it."""
        label = _label(shard, self.description)
        file, draft = self.path / f"{label}.arrow", self.path / f".{label}.partial"
        lock = WriterLock(self.path / f".lock-{label}", str(file), "give each process a RANK of its own")
        lock.acquire()
        try:
            # A fingerprint in the file spares `datasets` from making one of all its contents.
            fingerprint = f"{_digest(self.description)[:16]}-{shard}"
            with ArrowWriter(features=features, path=str(draft), fingerprint=fingerprint) as writer:
                # The teacher computes the rows here. Its errors are not those of the disk, so only the lines that write
                # are watched.
                for columns in rows:
                    with _writing(file):
                        writer.write_batch(columns)
                with _writing(file):
                    writer.finalize()
            with _writing(file):
                whole = self.path / _name(shard, self.description, _contents(draft))
                put_in_place(draft, whole)
            for other in self._files(shard, self.description):
                if other != whole:
                    other.unlink()
        finally:
            draft.unlink(missing_ok=True)
            lock.release()

    def missing(self) -> list[int]:
        shards = range(self.description["num_shards"])
        return [shard for shard in shards if not self._files(shard, self.description)]

    def read(self) -> Dataset:
        """Map all rows from disk, of the files that this reads and checks, also if others take their names later."""
        shards = self._with_bar(range(self.description["num_shards"]))
        self._checked = [self._find(shard, self.description) for shard in shards]
        parts = [Dataset.from_buffer(shard.content) for shard in self._checked]
        self._ends = list(accumulate(part.num_rows for part in parts))
        return concatenate_datasets(parts)

    def check_unchanged(self, rows: Iterable[int]) -> None:
        """Raise a ValueError if something was written into the files of some rows since `read` checked them."""
        for shard in {bisect_right(self._ends, row) for row in rows}:
            file = self._checked[shard].file
            if _was_written_into(file, self._checked[shard].before):
                raise ValueError(f"{file} was changed while it was in use; start again, which checks all files anew")

    def _find(self, shard: int, description: Mapping[str, Any]) -> "_Shard":
        files = self._files(shard, description)
        for file in files:
            with _reading(file):
                # Before reading, so that writes meanwhile are noticed later.
                before = file.stat()
                content = _contents(file)
            if file.name == _name(shard, description, content):
                return _Shard(file, before, content)
        if files:
            raise _AbsentError(
                f"{files[-1]} is truncated, damaged or not of the couplings that {DESCRIPTION_FILE} describes: its "
                f"name ends in the digest of other contents; {_AGAIN}"
            )
        raise _AbsentError(f"{self.path / _label(shard, description)}-*.arrow is missing; {_AGAIN}")

    def _is_complete(self, shard: int, description: Mapping[str, Any]) -> bool:
        try:
            self._find(shard, description)
        except _AbsentError:
            return False
        return True

    def _files(self, shard: int, description: Mapping[str, Any]) -> list[Path]:
        """Return the files that claim to be a shard: mostly one, and others where caches were mixed up."""
        return sorted(self.path.glob(f"{_label(shard, description)}-*.arrow"))

    def _write_description(self, description: Mapping[str, Any]) -> None:
        # Several processes may write it at the same time; the last one wins, with equal bytes.
        file, draft = self.path / DESCRIPTION_FILE, self.path / f".{DESCRIPTION_FILE}-{uuid.uuid4().hex}"
        with _writing(file):
            try:
                draft.write_text(json.dumps({**description, "sha256": _digest(description)}, indent=2))
                put_in_place(draft, file)
            finally:
                draft.unlink(missing_ok=True)

    def _with_bar(self, shards: Iterable[int]) -> Iterable[int]:
        return tqdm(shards, desc=f"checking {self.path}", unit="shard", delay=10)


class _Shard(NamedTuple):
    """A checked shard: its file, that file's size and times before, and its contents, mapped beyond the file's name."""

    file: Path
    before: os.stat_result
    content: pyarrow.Buffer


class _AbsentError(ValueError):
    """A file is missing, damaged or of other couplings, and `precompute` mends it by writing it."""


def check_same(folder: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise a ValueError that names each field of `expected` in which a cache differs, and both values."""
    different = [
        f"{name} is {_short(found.get(name))} there and {_short(value)} here"
        for name, value in expected.items()
        if found.get(name) != value
    ]
    if different:
        raise ValueError(
            f"the couplings in {folder} are not the ones asked for: {'; '.join(different)}. Use the settings that they "
            "were made with, or precompute them again into a new folder"
        )


def coupling_features(num_elements: int, with_observations: bool) -> Features:
    columns = {
        "index": Value("int64"),
        "draw": Value("int32"),
        "noise_seed": Value("int64"),
        "observation_checksum": Value("int64"),
        "target": Sequence(Value("float32"), length=num_elements),
    }
    return Features({**columns, "observation": Value("binary")} if with_observations else columns)


def _label(shard: int, description: Mapping[str, Any]) -> str:
    return f"data-{shard:05d}-of-{description['num_shards']:05d}"


def _name(shard: int, description: Mapping[str, Any], content: pyarrow.Buffer) -> str:
    digest = hashlib.sha256(f"{_digest(description)} {shard}\n".encode())
    digest.update(content)
    return f"{_label(shard, description)}-{digest.hexdigest()[:16]}.arrow"


def _digest(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{_FORMAT} {json.dumps(description, sort_keys=True)}".encode()).hexdigest()


def _contents(file: Path) -> pyarrow.Buffer:
    with pyarrow.memory_map(str(file)) as mapped:
        return mapped.read_buffer()


def _was_written_into(file: Path, before: os.stat_result) -> bool:
    """Return whether the checked file has been written into; another that has taken its name is no matter."""
    try:
        now = file.stat()
    except FileNotFoundError:
        return False
    written = (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)
    return os.path.samestat(now, before) and written


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _AbsentError(f"{file} is missing: `precompute` did not finish; {_AGAIN}") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error}): mend that or delete it, and {_AGAIN}") from error


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise not_written(file, error, f". Make room, and {_AGAIN}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text[:17]}…'" if isinstance(value, str) and len(text) > 40 else text
