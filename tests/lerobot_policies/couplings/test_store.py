"""A damaged or mixed-up cache of couplings is refused by the file's name, and the same command mends it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from late_imports import LateModule

coupling_toys = LateModule("coupling_toys")
couplings_cache = LateModule("hf_memopt.lerobot.couplings.cache")
coupling_spec = LateModule("hf_memopt.lerobot.couplings.coupling_spec")
datasets = LateModule("datasets")
couplings_key = LateModule("hf_memopt.lerobot.couplings.key")
writer = LateModule("hf_memopt.lerobot.couplings.writer")


SHARD = "data-00002-of-00006"
AGAIN = r"run the same `precompute` command again$"


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of as many shards of the same shape: of another teacher, other noise, another order. Read only."""
    path, spec = tmp_path_factory.mktemp("others"), coupling_toys.make_spec()
    for name, other in (
        ("teacher", coupling_toys.make_spec(weights="0" * 64)),
        ("noise", coupling_toys.make_spec(seed=8)),
        ("order", coupling_spec.CouplingSpec(**{**vars(spec), "indices": spec.indices[::-1]})),
    ):
        writer.precompute(coupling_toys.Teacher(), coupling_toys.load, other, path / name, shard_size=8)
    return path


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        couplings_cache.CouplingCache(folder)
    assert "\n" not in str(raised.value)


# ------------------------------------------------------------------------------------------------ mixed up


@pytest.mark.parametrize("other", ["teacher", "noise", "order"])
def test_a_shard_of_another_cache_is_refused_by_name_and_replaced(own: Path, others: Path, other: str) -> None:
    for suffix in (".arrow", ".json"):
        shutil.copyfile(others / other / f"{SHARD}{suffix}", own / f"{SHARD}{suffix}")
    refuse(
        own,
        rf"{SHARD}\.arrow is not of the couplings that couplings\.json describes: .* another specification's; {AGAIN}",
    )
    assert coupling_toys.write(own) == []
    coupling_toys.assert_is_the_teachers(own)


def test_a_shard_in_another_ones_place_is_refused_by_name_and_replaced(own: Path) -> None:
    for suffix in (".arrow", ".json"):
        shutil.copyfile(own / f"data-00001-of-00006{suffix}", own / f"{SHARD}{suffix}")
    refuse(own, rf"{SHARD}\.arrow is not shard 2: its \.json says 1; {AGAIN}")
    assert coupling_toys.write(own) == []
    coupling_toys.assert_is_the_teachers(own)


def test_the_shards_that_were_checked_are_those_that_are_read(own: Path, others: Path) -> None:
    state = own / "state.json"
    state.write_text(state.read_text().replace('"data-', f'"{others / "teacher"}/data-'))
    cache = couplings_cache.CouplingCache(own)
    for file in own.glob("*.arrow"):
        shutil.copyfile(others / "noise" / file.name, own / "draft")
        (own / "draft").replace(file)
    coupling_toys.assert_same(coupling_toys.couplings_of(cache), coupling_toys.teachers_couplings())


@pytest.mark.parametrize("change", ["overwritten", "emptied"])
def test_a_file_that_is_changed_while_it_is_in_use_is_refused(own: Path, others: Path, change: str) -> None:
    cache, file = couplings_cache.CouplingCache(own), own / f"{SHARD}.arrow"
    file.write_bytes((others / "noise" / file.name).read_bytes() if change == "overwritten" else b"")
    with pytest.raises(ValueError, match=rf"{file} was changed while it was in use; start again, which checks all"):
        coupling_toys.couplings_of(cache)
    refuse(own, rf"{file.name} is truncated or damaged")


def test_halves_that_were_written_apart_are_put_together_by_copying(tmp_path: Path) -> None:
    for rank in (0, 1):
        coupling_toys.write(tmp_path / str(rank), rank=rank, world_size=2)
        shutil.copytree(tmp_path / str(rank), tmp_path / "cache", dirs_exist_ok=True)
    coupling_toys.assert_is_the_teachers(tmp_path / "cache")


def test_a_cache_of_an_older_version_is_refused_and_not_overwritten(own: Path) -> None:
    _rewrite(own / "couplings.json", lambda described: described.pop("sha256"))
    for note in own.glob("data-*.json"):
        _rewrite(note, lambda noted: [noted.pop(key) for key in ("couplings", "shard")])
    refuse(own, rf"couplings\.json is damaged, or of an older version of hf_memopt; {AGAIN}")
    with pytest.raises(ValueError, match=r"holds other files \(data-.*\); delete them, or name a new folder"):
        coupling_toys.write(own)


def test_a_description_is_written_again_for_its_own_shards_only(own: Path, others: Path) -> None:
    (own / "couplings.json").unlink()
    refuse(own, rf"{own} holds no couplings: there is no couplings\.json in it; {AGAIN}")
    stamps = {file: file.stat().st_mtime_ns for file in own.glob("*.arrow")}
    assert coupling_toys.write(own) == []
    assert {file: file.stat().st_mtime_ns for file in own.glob("*.arrow")} == stamps
    coupling_toys.assert_is_the_teachers(own)

    shutil.copyfile(others / "noise" / f"{SHARD}.json", own / f"{SHARD}.json")
    (own / "couplings.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"holds other files \({SHARD}\.arrow, …\); delete them, or name a new"):
        coupling_toys.write(own)


def test_a_dataset_that_somebody_saved_is_not_taken_for_a_cache(own: Path) -> None:
    for file in (*own.glob("data-*.json"), own / "couplings.json"):
        file.unlink()
    with pytest.raises(ValueError, match=r"holds other files \(data-00000-of-00006\.arrow"):
        coupling_toys.write(own)


# ------------------------------------------------------------------------------------------------ damaged


def test_the_folder_is_a_dataset_of_the_datasets_library(folder: Path) -> None:
    rows = datasets.load_from_disk(str(folder))
    assert rows.num_rows == 2 * coupling_toys.NUM_SAMPLES
    assert rows[0]["noise_seed"] == couplings_key.noise_seed(7, rows[0]["index"], 0)
    assert len(rows[0]["target"]) == 6
    assert len(rows.cache_files) == 6


def test_every_truncation_and_every_flipped_byte_is_found(own: Path) -> None:
    file = own / "data-00003-of-00006.arrow"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (whole[:-1], whole[:100], b"", bytes(flipped), whole + b"\0"):
        file.write_bytes(damaged)
        refuse(own, r"data-00003-of-00006\.arrow is truncated or damaged")
    file.write_bytes(whole)
    couplings_cache.CouplingCache(own)


def test_an_unfinished_cache_is_refused_and_repaired_by_the_same_command(own: Path) -> None:
    (own / "data-00002-of-00006.arrow").unlink()
    refuse(own, r"data-00002-of-00006\.arrow is missing")
    before = {file: file.stat().st_mtime_ns for file in own.glob("*.arrow")}
    assert coupling_toys.write(own) == []
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in before.items())
    coupling_toys.assert_is_the_teachers(own)


def test_folders_without_couplings_are_refused(tmp_path: Path, own: Path) -> None:
    refuse(tmp_path, "holds no couplings")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex"):
        coupling_toys.write(tmp_path / "other")
    (own / "couplings.json").write_text("{")
    refuse(own, r"couplings.json is damaged")


def _folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _link_to(target: str) -> Callable[[Path], None]:
    def link(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return link


def _rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


BAD_JSON = ["", "{}", "null", "[" * 100_000]


@pytest.mark.parametrize("file", ["couplings.json", f"{SHARD}.json", f"{SHARD}.arrow"])
@pytest.mark.parametrize(
    "damage",
    [
        *(lambda file, text=text: file.write_text(text) for text in BAD_JSON),
        lambda file: file.write_bytes(b"\xff" + file.read_bytes()),
        lambda file: file.write_bytes(file.read_bytes()[:-3]),
        lambda file: file.write_bytes(b"1" * file.stat().st_size),
        Path.unlink,
        _link_to("nothing"),
    ],
    ids=[*(text[:8] or "empty" for text in BAD_JSON), "not text", "cut", "bits", "deleted", "dangling"],
)
def test_a_damaged_file_is_named_and_mended_by_the_same_command(
    own: Path, file: str, damage: Callable[[Path], object]
) -> None:
    damage(own / file)
    with pytest.raises(ValueError, match=f"{Path(file).stem}.*run the same") as raised:
        couplings_cache.CouplingCache(own)
    assert "\n" not in str(raised.value)
    assert coupling_toys.write(own) == []
    coupling_toys.assert_is_the_teachers(own)


@pytest.mark.parametrize("file", ["couplings.json", f"{SHARD}.json", f"{SHARD}.arrow"])
@pytest.mark.parametrize("damage", [_folder_instead, lambda file: _link_to(file.name)(file)], ids=["folder", "loop"])
def test_what_precompute_cannot_replace_is_to_be_deleted(
    own: Path, file: str, damage: Callable[[Path], object]
) -> None:
    damage(own / file)
    message = rf"{own / file} cannot be read \(.*\): mend that or delete it, and {AGAIN}"
    refuse(own, message)
    with pytest.raises(ValueError, match=message):
        coupling_toys.write(own)
    (own / file).rmdir() if (own / file).is_dir() else (own / file).unlink()
    assert coupling_toys.write(own) == []
    coupling_toys.assert_is_the_teachers(own)


def test_a_file_that_may_not_be_read_is_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_bytes", refused)
    refuse(own, r"couplings\.json cannot be read \(\[Errno 13\] Permission denied: .*\): mend that or delete it")


@pytest.mark.parametrize("key", ["couplings", "shard", "num_bytes", "sha256"])
@pytest.mark.parametrize("value", [None, -1, "missing"])
def test_a_note_that_says_something_else_never_gives_other_couplings(own: Path, key: str, value: Any) -> None:
    _rewrite(own / f"{SHARD}.json", lambda note: note.pop(key) if value == "missing" else note.update({key: value}))
    refuse(own, rf"{SHARD}\.arrow is")
    assert coupling_toys.write(own) == []
    coupling_toys.assert_is_the_teachers(own)


@pytest.mark.parametrize("file", ["state.json", "dataset_info.json"])
def test_what_only_the_datasets_library_reads_is_mended_too(own: Path, file: str) -> None:
    whole = (own / file).read_bytes()
    (own / file).write_text("{}")
    coupling_toys.assert_is_the_teachers(own)
    assert coupling_toys.write(own) == []
    assert (own / file).read_bytes() == whole
    _folder_instead(own / file)
    with pytest.raises(ValueError, match=rf"{own / file} is a folder: delete it, and {AGAIN}"):
        coupling_toys.write(own)


def test_an_output_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=rf"output='{output}' cannot be created \(.*\); name another folder"):
            coupling_toys.write(output)
        refuse(output, "holds no couplings")


# ------------------------------------------------------------------------------------------------ one writer


def test_a_second_writer_of_a_shard_is_told(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with FileLock(cache / ".lock-data-00000-of-00006"):
        with pytest.raises(
            ValueError, match=rf"{cache}/data-.*\.arrow: another process is writing there\. .* give each process a RANK"
        ):
            coupling_toys.write(cache)
        assert coupling_toys.write(cache, rank=5, world_size=6) == [0, 1, 2, 3, 4]
    assert coupling_toys.write(cache) == []
    coupling_toys.assert_is_the_teachers(cache)


def test_the_lock_of_a_dead_writer_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    lock = tmp_path / "cache" / ".lock-data-00000-of-00006"
    code = (
        "import os, pathlib, sys; from hf_memopt.disk.locks import WriterLock;"
        f"WriterLock(pathlib.Path({str(lock)!r}), '', '').acquire(); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert lock.exists()
    assert coupling_toys.write(tmp_path / "cache") == []
    assert not lock.exists()
