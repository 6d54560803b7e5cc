"""Tests that a damaged cache gives the teacher's couplings or an error, and that the error's remedy helps."""

import dataclasses
import functools
import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from mutations import Tally, content, delete, empty, link_to_nothing, mutations_of, overwrite, restore, turn_into_folder

coupling_toys = LateModule("coupling_toys")
couplings_cache = LateModule("hf_memopt.lerobot.couplings.cache")
writer = LateModule("hf_memopt.lerobot.couplings.cache")


SEED = 4

Attack = Callable[[Path, Path, random.Random], None]


def other_teacher() -> Any:
    """A teacher with other targets."""
    teacher = coupling_toys.Teacher()
    teacher.layers[-1].bias.data += 1
    return teacher


@functools.cache
def make_spec() -> Any:
    return coupling_toys.make_spec(batch_size=6)


def write(folder: Path, spec: Any = None, teacher: Any = None) -> list[int]:
    return writer.precompute(
        teacher or coupling_toys.Teacher(), coupling_toys.load, spec or make_spec(), folder, shard_size=12
    )


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole caches of as many shards: one to attack, and one each of another teacher, other noise, another order."""
    folder = tmp_path_factory.mktemp("caches")
    write(folder / "pristine")
    write(folder / "teacher", coupling_toys.make_spec(batch_size=6, weights="0" * 64), other_teacher())
    write(folder / "noise", coupling_toys.make_spec(batch_size=6, seed=8))
    write(folder / "order", dataclasses.replace(make_spec(), indices=make_spec().indices[::-1]))
    return folder


def couplings(folder: Path) -> list[Any]:
    """Return all couplings, in the specification's order."""
    cache = couplings_cache.CouplingCache(folder)
    cache.check(make_spec().key)
    found: list[Any] = coupling_toys.couplings_of(cache, make_spec())
    return found


def equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(ours.noise, theirs.noise)
        and torch.equal(ours.target, theirs.target)
        and torch.equal(ours.observation["state"], theirs.observation["state"])
        for ours, theirs in zip(first, second, strict=True)
    )


# ------------------------------------------------------------------------------------------------ kinds of attack


def damage_a_file(folder: Path, other: Path, dice: random.Random) -> None:
    file = dice.choice(sorted(folder.iterdir()))
    dice.choice(mutations_of(file))(file, dice)


def damage_two_files(folder: Path, other: Path, dice: random.Random) -> None:
    first, second = dice.sample(sorted(folder.iterdir()), 2)
    dice.choice(mutations_of(first))(first, dice)
    dice.choice([delete, empty, overwrite, turn_into_folder, link_to_nothing])(second, dice)


def place(shard: Path) -> str:
    """Return a shard's place, from its name without the digest."""
    return shard.name[: len("data-00000-of-00004")]


def take_the_place_of(shard: Path, folder: Path) -> Path:
    """Return the shard's path in a folder that then has no other of its place."""
    for file in folder.glob(f"{place(shard)}-*"):
        file.unlink()
    return folder / shard.name


def take_a_shard_of_another_cache(folder: Path, other: Path, dice: random.Random) -> None:
    data = dice.choice(sorted(other.glob("*.arrow")))
    shutil.copyfile(data, take_the_place_of(data, folder))


def take_a_file_of_another_cache(folder: Path, other: Path, dice: random.Random) -> None:
    file = dice.choice(sorted(other.iterdir()))
    shutil.copyfile(file, folder / file.name)


def take_all_shards_of_another_cache(folder: Path, other: Path, dice: random.Random) -> None:
    for file in other.glob("data-*"):
        shutil.copyfile(file, take_the_place_of(file, folder))


def take_another_cache(folder: Path, other: Path, dice: random.Random) -> None:
    """Take a cache of another key: one of the same key in another order is as good."""
    restore(folder, folder.parent / dice.choice(["teacher", "noise"]))


def swap_the_contents_of_two_shards(folder: Path, other: Path, dice: random.Random) -> None:
    _swap(*dice.sample(sorted(folder.glob("*.arrow")), 2))


def swap_the_places_of_two_shards(folder: Path, other: Path, dice: random.Random) -> None:
    first, second = dice.sample(sorted(folder.glob("*.arrow")), 2)
    first_again = folder / first.name.replace(place(first), place(second))
    second.rename(folder / second.name.replace(place(second), place(first)))
    first.rename(first_again)


def copy_a_shard_to_another_place(folder: Path, other: Path, dice: random.Random) -> None:
    first, second = dice.sample(sorted(folder.glob("*.arrow")), 2)
    second.unlink()
    shutil.copyfile(first, folder / first.name.replace(place(first), place(second)))


def delete_a_shard(folder: Path, other: Path, dice: random.Random) -> None:
    dice.choice(sorted(folder.glob("*.arrow"))).unlink()


def describe_another_cache(folder: Path, other: Path, dice: random.Random) -> None:
    """Describe another cache as if the description had no digest."""
    file = folder / "couplings.json"
    described = json.loads((other / file.name).read_text())
    file.write_text(json.dumps({**described, "sha256": json.loads(file.read_text())["sha256"]}))


def link_to_a_shard_of_another_cache(folder: Path, other: Path, dice: random.Random) -> None:
    data = dice.choice(sorted(other.glob("*.arrow")))
    take_the_place_of(data, folder).symlink_to(data)


def rename_the_shards(folder: Path, other: Path, dice: random.Random) -> None:
    for file in folder.glob("data-*"):
        file.rename(folder / file.name.replace("of-00004", "of-00005"))


KINDS: tuple[Attack, ...] = (
    damage_a_file,
    damage_two_files,
    take_a_shard_of_another_cache,
    take_a_file_of_another_cache,
    take_all_shards_of_another_cache,
    take_another_cache,
    swap_the_contents_of_two_shards,
    swap_the_places_of_two_shards,
    copy_a_shard_to_another_place,
    delete_a_shard,
    describe_another_cache,
    link_to_a_shard_of_another_cache,
    rename_the_shards,
)


def _swap(first: Path, second: Path) -> None:
    ours, theirs = first.read_bytes(), second.read_bytes()
    first.write_bytes(theirs)
    second.write_bytes(ours)


# ------------------------------------------------------------------------------------------------ the attack


def attack(caches: Path, num_mutations: int) -> Tally:
    tally, dice = Tally("couplings on disk, damaged and swapped", SEED), random.Random(SEED)
    folder = caches / "attacked"
    right, before = couplings(caches / "pristine"), content(caches / "pristine")
    folder.mkdir()
    while tally.tried < num_mutations:
        restore(folder, caches / "pristine")
        kind = dice.choice(KINDS[:1] * 6 + KINDS)
        kind(folder, caches / dice.choice(["teacher", "noise", "order"]), dice)
        after = content(folder)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        if changed:
            judge(tally, folder, f"{kind.__name__} {sorted(changed)}", changed, right)
    return tally


def judge(tally: Tally, folder: Path, what: str, changed: set[str], right: list[Any]) -> None:
    """Read the folder, do as the error says, and read again."""
    try:
        found = couplings(folder)
    except ValueError as error:
        complaint = str(error)
    except Exception as error:
        tally.unclear.append(f"{what}: {error!r}")
        return
    else:
        if equal(found, right):
            tally.right += 1
        else:
            tally.silent.append(what)
        return
    named = any(place(Path(name)) in complaint for name in changed) or "not the ones asked for" in complaint
    if not named or "\n" in complaint:
        tally.unclear.append(f"{what}: {complaint}")
    elif not mended(folder, complaint, right):
        tally.unclear.append(f"{what}: the remedy does not help: {complaint}")
    else:
        tally.refused += 1


def mended(folder: Path, complaint: str, right: list[Any]) -> bool:
    """Return whether the couplings are right after at most three rounds of remedies."""
    for _ in range(4):
        if "new folder" in complaint:
            return True
        for name in re.findall(r"(\S+) (?:cannot be read|is a folder).* delete it", complaint):
            Path(name).rmdir() if Path(name).is_dir() else Path(name).unlink()
        try:
            return write(folder) == [] and equal(couplings(folder), right)
        except ValueError as error:
            complaint = str(error)
    return False


@pytest.mark.parametrize("num_mutations", [40, pytest.param(2_500, marks=pytest.mark.slow)])
def test_damaged_couplings_are_the_teachers_or_are_refused(caches: Path, num_mutations: int) -> None:
    attack(caches, num_mutations).check(num_mutations)
