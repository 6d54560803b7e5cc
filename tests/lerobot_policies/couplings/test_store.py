"""Tests that damaged and mixed-up caches are refused by file name, and mended by the same command."""

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
datasets = LateModule("datasets")
couplings_cache = LateModule("hf_memopt.lerobot.couplings.cache")
coupling_spec = LateModule("hf_memopt.lerobot.couplings.cache")
writer = LateModule("hf_memopt.lerobot.couplings.cache")


AGAIN = r"run the same `precompute` command again$"


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of the same shape: of another teacher, other noise, another order. Read only."""
    path, spec = tmp_path_factory.mktemp("others"), coupling_toys.make_spec()
    for name, other in (
        ("teacher", coupling_toys.make_spec(weights="0" * 64)),
        ("noise", coupling_toys.make_spec(seed=8)),
        ("order", coupling_spec.CouplingSpec(**{**vars(spec), "indices": spec.indices[::-1]})),
    ):
        writer.precompute(coupling_toys.Teacher(), coupling_toys.load, other, path / name, shard_size=8)
    return path


def shard_of(folder: Path, shard: int = 2) -> Path:
    (file,) = folder.glob(f"data-0000{shard}-of-00006-*.arrow")
    return file


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        couplings_cache.CouplingCache(folder)
    assert "\n" not in str(raised.value)


def test_the_folder_is_read_by_the_datasets_library_alone(folder: Path) -> None:
    files = sorted(folder.glob("data-*.arrow"))
    assert len(files) == 6
    rows = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
    assert rows.num_rows == 2 * coupling_toys.NUM_SAMPLES
    assert rows[0]["noise_seed"] == coupling_spec.noise_seed(7, rows[0]["index"], 0)
    assert len(rows[0]["target"]) == 6


# ------------------------------------------------------------------------------------------------ mixed up


@pytest.mark.parametrize("other", ["teacher", "noise", "order"])
def test_a_shard_of_another_cache_is_refused_by_name_and_replaced(own: Path, others: Path, other: str) -> None:
    shard_of(own).unlink()
    stranger = Path(shutil.copy(shard_of(others / other), own))
    refuse(own, rf"{stranger} is .* not of the couplings that couplings\.json describes: .*; {AGAIN}")
    assert coupling_toys.write(own) == []
    coupling_toys.assert_is_the_teachers(own)
    assert not stranger.exists()


def test_a_shard_of_another_cache_beside_the_right_one_does_no_harm(own: Path, others: Path) -> None:
    for other in ("teacher", "noise", "order"):
        shutil.copy(shard_of(others / other), own)
    coupling_toys.assert_is_the_teachers(own)


def test_a_shard_in_another_ones_place_is_refused_by_name_and_replaced(own: Path) -> None:
    file, other = shard_of(own), shard_of(own, 1)
    for name in (file.name, other.name.replace("data-00001", "data-00002")):
        file.unlink(missing_ok=True)
        shutil.copyfile(other, own / name)
        refuse(own, rf"{own / name} is truncated, damaged or not of the couplings that .*; {AGAIN}")
        assert coupling_toys.write(own) == []
        coupling_toys.assert_is_the_teachers(own)


def test_the_shards_that_were_checked_are_those_that_are_read(own: Path, others: Path) -> None:
    cache = couplings_cache.CouplingCache(own)
    for shard in range(6):
        shutil.copyfile(shard_of(others / "noise", shard), own / "draft")
        (own / "draft").replace(shard_of(own, shard))
    coupling_toys.assert_same(coupling_toys.couplings_of(cache), coupling_toys.teachers_couplings())


@pytest.mark.parametrize("change", ["overwritten", "emptied"])
def test_a_file_that_is_changed_while_it_is_in_use_is_refused(own: Path, others: Path, change: str) -> None:
    cache, file = couplings_cache.CouplingCache(own), shard_of(own)
    file.write_bytes(shard_of(others / "noise").read_bytes() if change == "overwritten" else b"")
    with pytest.raises(ValueError, match=rf"{file} was changed while it was in use; start again, which checks all"):
        coupling_toys.couplings_of(cache)
    refuse(own, rf"{file.name} is truncated, damaged")


def test_halves_that_were_written_apart_are_put_together_by_copying(tmp_path: Path) -> None:
    for rank in (0, 1):
        coupling_toys.write(tmp_path / str(rank), rank=rank, world_size=2)
        shutil.copytree(tmp_path / str(rank), tmp_path / "cache", dirs_exist_ok=True)
    coupling_toys.assert_is_the_teachers(tmp_path / "cache")


def test_a_cache_of_an_older_version_is_refused_and_not_overwritten(tmp_path: Path) -> None:
    """Check shards without digests in their names, and a description with another digest."""
    (tmp_path / "couplings.json").write_text(json.dumps({"num_shards": 6, "sha256": "0" * 64}))
    (tmp_path / "data-00000-of-00006.arrow").write_text("precious")
    refuse(tmp_path, rf"couplings\.json is damaged, or of an older version of hf_memopt; {AGAIN}")
    with pytest.raises(ValueError, match=r"holds other files \(data-00000-of-00006\.arrow, …\); delete them, or name"):
        coupling_toys.write(tmp_path)
    assert (tmp_path / "data-00000-of-00006.arrow").read_text() == "precious"


def test_a_description_is_written_again_for_its_own_shards_only(own: Path, others: Path) -> None:
    (own / "couplings.json").unlink()
    refuse(own, rf"{own} holds no couplings: there is no couplings\.json in it; {AGAIN}")
    stamps = {file: file.stat().st_mtime_ns for file in own.glob("*.arrow")}
    assert coupling_toys.write(own) == []
    assert {file: file.stat().st_mtime_ns for file in own.glob("*.arrow")} == stamps
    coupling_toys.assert_is_the_teachers(own)

    strangers = shutil.copytree(others / "noise", own.with_name("strangers"))
    (strangers / "couplings.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds other files \(data-00000-.*, …\); delete them, or name a new folder"):
        coupling_toys.write(strangers)


def test_folders_without_couplings_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path, "holds no couplings")
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex"):
        coupling_toys.write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


# ------------------------------------------------------------------------------------------------ damaged


def _folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _link_to(target: str) -> Callable[[Path], None]:
    def link(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return link


def test_every_truncation_and_every_flipped_byte_is_found(own: Path) -> None:
    file = shard_of(own)
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (whole[:-1], whole[:100], b"", bytes(flipped), whole + b"\0"):
        file.write_bytes(damaged)
        refuse(own, rf"{file} is truncated, damaged")
    file.write_bytes(whole)
    couplings_cache.CouplingCache(own)


def test_an_unfinished_cache_is_refused_and_repaired_by_the_same_command(own: Path) -> None:
    shard_of(own).unlink()
    refuse(own, rf"data-00002-of-00006-\*\.arrow is missing; {AGAIN}")
    before = {file: file.stat().st_mtime_ns for file in own.glob("*.arrow")}
    assert coupling_toys.write(own) == []
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in before.items())
    coupling_toys.assert_is_the_teachers(own)


BAD_JSON = ["", "{}", "null", "[" * 100_000]


@pytest.mark.parametrize("find", [lambda folder: folder / "couplings.json", shard_of], ids=["description", "shard"])
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
@pytest.mark.sweep(share=0.25)
def test_a_damaged_file_is_named_and_mended_by_the_same_command(
    own: Path, find: Callable[[Path], Path], damage: Callable[[Path], object]
) -> None:
    file = find(own)
    damage(file)
    with pytest.raises(ValueError, match=f"{file.stem[:19]}.*run the same") as raised:
        couplings_cache.CouplingCache(own)
    assert "\n" not in str(raised.value)
    assert coupling_toys.write(own) == []
    coupling_toys.assert_is_the_teachers(own)


@pytest.mark.parametrize("find", [lambda folder: folder / "couplings.json", shard_of], ids=["description", "shard"])
@pytest.mark.parametrize("damage", [_folder_instead, lambda file: _link_to(file.name)(file)], ids=["folder", "loop"])
def test_what_precompute_cannot_replace_is_to_be_deleted(
    own: Path, find: Callable[[Path], Path], damage: Callable[[Path], object]
) -> None:
    file = find(own)
    damage(file)
    message = rf"{file} cannot be read \(.*\): mend that or delete it, and {AGAIN}"
    refuse(own, message)
    with pytest.raises(ValueError, match=message):
        coupling_toys.write(own)
    file.rmdir() if file.is_dir() else file.unlink()
    assert coupling_toys.write(own) == []
    coupling_toys.assert_is_the_teachers(own)


def test_a_file_that_may_not_be_read_is_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_bytes", refused)
    refuse(own, r"couplings\.json cannot be read \(\[Errno 13\] Permission denied: .*\): mend that or delete it")


@pytest.mark.parametrize("value", [None, -1, "missing"])
def test_a_description_that_says_something_else_never_gives_other_couplings(own: Path, value: Any) -> None:
    file = own / "couplings.json"
    described = json.loads(file.read_text())
    for key in described:
        changed = {**described, key: value}
        file.write_text(json.dumps({name: each for name, each in changed.items() if each != "missing"}))
        refuse(own, r"couplings\.json is damaged, or of an older version")
        assert coupling_toys.write(own) == []
        assert json.loads(file.read_text()) == described


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
    assert not list(cache.glob(".*"))


def test_the_lock_and_the_draft_of_a_dead_writer_do_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    lock = tmp_path / "cache" / ".lock-data-00000-of-00006"
    code = (
        "import os, pathlib, sys; from hf_memopt.disk.files_on_disk import WriterLock;"
        f"WriterLock(pathlib.Path({str(lock)!r}), '', '').acquire(); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert lock.exists()
    (tmp_path / "cache" / ".data-00000-of-00006.partial").write_text("longer than a shard" * 1000)
    assert coupling_toys.write(tmp_path / "cache") == []
    coupling_toys.assert_is_the_teachers(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob(".*"))
