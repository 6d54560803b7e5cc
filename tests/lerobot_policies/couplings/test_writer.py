"""Tests of `precompute`, interrupted, starved and shared: finished shards stay, and none is made twice."""

import multiprocessing
import os
import random
from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule
from patience import HANG_S, wait_for
from ranks import torchrun

from hf_memopt import cli

coupling_toys = LateModule("coupling_toys")
couplings_cache = LateModule("hf_memopt.lerobot.couplings.cache")
writer = LateModule("hf_memopt.lerobot.couplings.cache")
smolvla_toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("data-*.arrow")}


def kill_at_random(folder: Path, num_kills: int, whole: dict[str, bytes]) -> tuple[int, int]:
    """Return how many kills hit a process at work, and how many shards survived. New folders follow finished ones."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hf_memopt.lerobot.couplings.cache"])
    rng = random.Random(0)
    hits, survived, current = 0, 0, folder / "0"
    for kill in range(num_kills):
        before = shards(current).keys()
        started = context.Event()
        process = context.Process(target=coupling_toys.precompute_slowly, args=(current, kill, started))
        process.start()
        assert started.wait(HANG_S)
        if kill % 2:  # while the second shard is written, at the earliest
            wait_for(partial(has_moved_on, current, before, process))
        process.join(rng.uniform(0, 0.1))
        process.kill()
        process.join()
        hits += process.exitcode != 0
        after = shards(current)
        assert before <= after.keys()
        assert after.items() <= whole.items()
        survived += len(after) if process.exitcode else 0
        # Only one shard's draft can be lost.
        assert len(list(current.glob(".data-*.partial"))) <= 1
        if len(after) == len(whole):
            couplings_cache.CouplingCache(current)
            current = folder / str(kill + 1)
    coupling_toys.write(current)
    coupling_toys.assert_is_the_teachers(current)
    return hits, survived


def has_moved_on(folder: Path, before: Set[str], process: Any) -> bool:
    return shards(folder).keys() != before or not process.is_alive()


@pytest.mark.e2e
@pytest.mark.parametrize("num_kills", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_loses_at_most_the_shard_in_flight(tmp_path: Path, folder: Path, num_kills: int) -> None:
    hits, survived = kill_at_random(tmp_path, num_kills, shards(folder))
    assert hits >= num_kills // 4
    assert survived > 0


def test_an_error_leaves_complete_shards_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, calls = os.fsync, 0

    def full_disk(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise OSError(28, "No space left on device")
        flush(handle)

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match=r"\.arrow could not be written: .*No space left.* bytes free"):
        coupling_toys.write(tmp_path / "cache")
    assert len(shards(tmp_path / "cache")) >= 1
    assert not [file.name for file in (tmp_path / "cache").iterdir() if file.name.startswith(".")]
    assert coupling_toys.write(tmp_path / "cache") == []


def test_processes_that_know_nothing_of_each_other_share_the_work(tmp_path: Path, folder: Path) -> None:
    solved: list[int] = []
    teacher = coupling_toys.Teacher()
    teacher.register_forward_hook(lambda *_: solved.append(1))

    def write(rank: int, world_size: int) -> list[int]:
        missing: list[int] = coupling_toys.write(tmp_path / "cache", teacher, rank=rank, world_size=world_size)
        return missing

    assert write(1, 3) == [0, 2, 3, 5]
    assert write(0, 2) == [3, 5]  # restarted with another number of processes
    assert write(1, 2) == []
    assert len(solved) == coupling_toys.make_spec().num_batches
    assert shards(tmp_path / "cache") == shards(folder)


@pytest.mark.slow
def test_two_processes_precompute_for_a_policy(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    flags = [f"--policy.path={toy_student}", "--policy.device=cpu", "--policy.push_to_hub=false"]
    flags += [*smolvla_toy.dataset_flags(toy_dataset), "--policy.teacher_num_steps=2", "--dataset.episodes=[0,1]"]
    shard_size = ["--shard-size", "5"]
    torchrun("-m", "hf_memopt.cli", "precompute", "--output", str(tmp_path / "two"), *shard_size, "--", *flags)
    assert cli.main(["precompute", "--output", str(tmp_path / "one"), *shard_size, "--", *flags]) == 0
    assert shards(tmp_path / "one") == shards(tmp_path / "two")
    one, two = (couplings_cache.CouplingCache(tmp_path / name) for name in ("one", "two"))
    assert (one.description, one.indices) == (two.description, two.indices)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"num_draws": 3}, "num_draws"), ({"batch_size": 2}, "batch_size"), ({"num_samples": 22}, "num_samples")],
)
def test_a_folder_is_completed_with_its_own_spec_only(folder: Path, changes: dict[str, int], field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is"):
        writer.precompute(
            coupling_toys.Teacher(), coupling_toys.load, coupling_toys.make_spec(**changes), folder, shard_size=8
        )


def test_random_augmentation_is_refused_before_anything_is_solved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="augmented at random"):
        writer.precompute(
            coupling_toys.Teacher(), coupling_toys.load_augmented, coupling_toys.make_spec(), tmp_path / "cache"
        )
    assert not list((tmp_path / "cache").glob("*.arrow"))


def test_targets_of_another_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"solve gave targets of shape \(4, 6\) for noise of shape \(4, 3, 2\)"):
        writer.precompute(
            lambda observation, noise: noise.flatten(1), coupling_toys.load, coupling_toys.make_spec(), tmp_path
        )
