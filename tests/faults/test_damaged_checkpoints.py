"""Tests of damaged, swapped and foreign checkpoints: only saved states load; the refusal names the remedy."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mutations
import pytest
from mutations import Mutation, Tally, content, restore
from toy_run import ToyRun

from hf_memopt.checkpoint.files import MANIFEST

REMEDIES = ("Resume from one of them", "restore one from a copy", "choose another folder")

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


class Saved(NamedTuple):
    run: ToyRun
    folder: Path
    states: dict[str, Any]  # by the checkpoint's name


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """Checkpoints of a run's steps 2 and 3; `others` has those of another run."""
    for name, seed in (("others", 1), ("run", 0)):
        run = ToyRun(tmp_path / name, seed=seed)
        run.train(3, save=True)
    states = {}
    for name in ("step-000002", "step-000003"):
        run.resume(name)
        states[name] = run.state()
    return Saved(run, tmp_path / "run", states)


# ------------------------------------------------------------------------------------ damage to a whole checkpoint


def sibling(checkpoint: Path) -> Path:
    (found,) = set(checkpoint.parent.glob("step-*")) - {checkpoint}
    return found


def others(checkpoint: Path) -> Path:
    """Return the other run's checkpoint of the same step."""
    return checkpoint.parent.with_name("others") / checkpoint.name


def swap_folders(checkpoint: Path, dice: random.Random) -> None:
    other, aside = sibling(checkpoint), checkpoint.with_name("aside")
    for old, new in ((checkpoint, aside), (other, checkpoint), (aside, other)):
        old.rename(new)


def copy_over(source: Path, checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(source, checkpoint)


def copy_sibling_over(checkpoint: Path, dice: random.Random) -> None:
    copy_over(sibling(checkpoint), checkpoint)


def copy_others_over(checkpoint: Path, dice: random.Random) -> None:
    copy_over(others(checkpoint), checkpoint)


def link_to(target: Path, checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.symlink_to(target)


def link_to_sibling(checkpoint: Path, dice: random.Random) -> None:
    link_to(sibling(checkpoint), checkpoint)


def link_to_others(checkpoint: Path, dice: random.Random) -> None:
    link_to(others(checkpoint), checkpoint)


def remove_folder(checkpoint: Path, dice: random.Random) -> None:
    shutil.rmtree(checkpoint)


def empty_folder(checkpoint: Path, dice: random.Random) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def add_file(checkpoint: Path, dice: random.Random) -> None:
    file = dice.choice(sorted(checkpoint.iterdir()))
    shutil.copy(file, checkpoint / f"copy_of_{file.name}")


def take_file_of_sibling(checkpoint: Path, dice: random.Random) -> None:
    file = dice.choice(sorted(checkpoint.iterdir()))
    shutil.copy(sibling(checkpoint) / file.name, file)


def take_file_of_others(checkpoint: Path, dice: random.Random) -> None:
    file = dice.choice(sorted(checkpoint.iterdir()))
    shutil.copy(others(checkpoint) / file.name, file)


def turn_into_pipe(checkpoint: Path, dice: random.Random) -> None:
    """Make a pipe without a writer."""
    file = dice.choice(sorted(checkpoint.iterdir()))
    file.unlink()
    os.mkfifo(file)


def latest_with_another_name(checkpoint: Path, dice: random.Random) -> None:
    """Keep the old digest."""
    latest = checkpoint.with_name("latest")
    latest.write_text(latest.read_text().replace("step-000003", "step-000002"))


FOLDER_KINDS: tuple[Mutation, ...] = (
    swap_folders,
    copy_sibling_over,
    copy_others_over,
    link_to_sibling,
    link_to_others,
    remove_folder,
    empty_folder,
    add_file,
    take_file_of_sibling,
    take_file_of_others,
    turn_into_pipe,
    latest_with_another_name,
)
KINDS = (*FOLDER_KINDS, *mutations.ANY_FILE, *mutations.JSON_FILE)


def target_of(kind: Mutation, checkpoint: Path, dice: random.Random) -> Path:
    if kind in FOLDER_KINDS:
        return checkpoint
    if kind in mutations.JSON_FILE:
        return checkpoint / MANIFEST
    return dice.choice([*sorted(checkpoint.iterdir()), checkpoint.with_name("latest")])


# ------------------------------------------------------------------------------------------------ the attack


@pytest.mark.parametrize(("num_mutations", "seed"), [(108, 0), pytest.param(1350, 1, marks=pytest.mark.slow)])
def test_no_damage_is_loaded_or_refused_without_a_remedy(num_mutations: int, seed: int, saved: Saved) -> None:
    """Aim each kind equally often at the checkpoint resumed as latest, by its name or by its path."""
    pristine = saved.folder.with_name("pristine")
    shutil.copytree(saved.folder, pristine)
    intact, dice = content(pristine), random.Random(seed)
    tally = Tally("damage to checkpoints, then resume", seed)
    while tally.tried < num_mutations:
        kind = KINDS[tally.tried % len(KINDS)]
        name = dice.choice(sorted(saved.states))
        asked = dice.choice([name, saved.folder / name, *["latest"] * (name == "step-000003")])
        target = target_of(kind, saved.folder / name, dice)
        kind(target, dice)
        if content(saved.folder) != intact:
            judge(tally, f"{kind.__name__} of {target.name}, resume({str(asked)!r})", saved, asked)
        restore(saved.folder, pristine)
    tally.check(num_mutations)


def judge(tally: Tally, attack: str, saved: Saved, asked: str | Path) -> None:
    name = "step-000003" if asked == "latest" else Path(asked).name
    before = saved.run.state()
    try:
        saved.run.resume(asked)
    except Exception as error:
        text = str(error)
        clear = isinstance(error, ValueError) and "\n" not in text and str(saved.folder) in text
        if saved.run.state() != before:
            tally.lost.append(f"{attack}: loaded in part")
        elif clear and any(remedy in text for remedy in REMEDIES):
            tally.refused += 1
        else:
            tally.unclear.append(f"{attack}: {type(error).__name__}: {text}")
        return
    if saved.run.state() == saved.states[name]:
        tally.right += 1
    else:
        tally.silent.append(attack)


@pytest.mark.parametrize(
    ("kind", "file", "message", "valid"),
    [
        (mutations.flip_bit, "scheduler.bin", r"scheduler\.bin differs from what was saved \(sha256\)", 2),
        (mutations.truncate, "scheduler.bin", r"scheduler\.bin has \d+ bytes instead of \d+", 2),
        (mutations.delete, "scheduler.bin", r"scheduler\.bin is missing", 2),
        (mutations.link_to_itself, "scheduler.bin", r"scheduler\.bin cannot be read: Too many levels of symbolic", 2),
        (mutations.link_to_nothing, "scheduler.bin", r"scheduler\.bin cannot be read: No such file", 2),
        (mutations.drop_key, MANIFEST, r"manifest\.json (was changed after it had been written|is damaged)", 2),
        (mutations.nest_deeply, MANIFEST, r"manifest\.json is damaged: maximum recursion depth exceeded", 2),
        (add_file, ".", r"copy_of_\S+ is not part of it; remove that file", 2),
        (turn_into_pipe, ".", r"(is missing|is not a regular file)", 2),
        (swap_folders, ".", "is that of step-000002: another checkpoint has been put into this folder", None),
        (copy_sibling_over, ".", "is that of step-000002: another checkpoint has been put", 2),
        (copy_others_over, ".", "another run than that of step-000003 saved it", 2),
        (link_to_others, ".", "it is a symbolic link; name the folder that it leads to", 2),
    ],
)
@pytest.mark.sweep(share=0.25)
def test_a_refusal_names_the_file_and_the_remedy(
    kind: Callable[..., None], file: str, message: str, valid: int | None, saved: Saved
) -> None:
    kind(saved.folder / "step-000003" / file, random.Random(0))
    before = saved.run.state()
    remedy = (
        rf"valid in .*: step-00000{valid}\. Resume from one of them by its path" if valid else "no valid checkpoint"
    )
    with pytest.raises(ValueError, match=rf"is not what was saved: .*{message}.*; .*{remedy}"):
        saved.run.resume("latest")
    assert saved.run.state() == before
    if valid:
        saved.run.resume(f"step-00000{valid}")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (copy_sibling_over, "is that of step-000003"),
        (copy_others_over, "another run than that of step-000003 saved it"),
        (link_to_sibling, "it is a symbolic link"),
    ],
)
def test_an_older_name_with_another_checkpoint_is_refused(kind: Mutation, message: str, saved: Saved) -> None:
    kind(saved.folder / "step-000002", random.Random(0))
    message = rf"step-000002 is not what was saved: .*{message}.*; valid in .*: step-000003\. Resume"
    with pytest.raises(ValueError, match=message):
        saved.run.resume("step-000002")


def test_latest_with_another_name_is_refused(saved: Saved) -> None:
    """Refuse, since both checkpoints are valid, and the user says which."""
    latest_with_another_name(saved.folder / "step-000003", random.Random(0))
    message = r"step-000002/manifest\.json is not the one that .*latest was written with; valid in .*: step-0+2, step-0"
    with pytest.raises(ValueError, match=message):
        saved.run.resume("latest")
    saved.run.resume("step-000003")


def test_the_manifest_says_what_was_saved(saved: Saved) -> None:
    """Check the measure of the attacks."""
    assert saved.states["step-000002"] != saved.states["step-000003"]
    assert json.loads((saved.folder / "step-000003" / MANIFEST).read_text())["position"]["step"] == 3
