"""Tests that `export` and `prepare-student` refuse a policy that cannot work, and name the file."""

import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from late_imports import LateModule
from mutations import (
    ANY_FILE,
    JSON_FILE,
    Tally,
    change_type,
    change_value,
    drop_key,
    flip_bit,
    mutations_of,
    restore,
)
from torch import Tensor

from hf_memopt.cli import main

modeling_smolvla_reflow = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
prepare = LateModule("hf_memopt.lerobot.student.prepare")
smolvla_toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
policies = LateModule("lerobot.policies")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")


COMMANDS = {
    "export": (["export", "--no-evaluation", "--num-steps", "2", "--policy"], lambda: modeling_smolvla.SmolVLAPolicy),
    "prepare-student": (["prepare-student", "--teacher"], lambda: modeling_smolvla_reflow.SmolVLAReflowPolicy),
}
# May leave another policy that works, and a checkpoint does not tell it from the intended one.
EDITS = (flip_bit, drop_key, change_value, change_type)
MiB = 2**20


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Fail at sizes of a billion in a configuration, instead of taking the machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2048 * MiB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def act(find_class: Callable[[], Any], folder: Path) -> Tensor:
    """Return lerobot's own actions, `(1, chunk, action_dim)`."""
    policy = find_class().from_pretrained(folder, strict=True)
    on_the_cpu = {"device_processor": {"device": "cpu"}}
    preprocess, postprocess = policies.make_pre_post_processors(
        policy.config, pretrained_path=str(folder), preprocessor_overrides=on_the_cpu
    )
    generator = torch.Generator().manual_seed(2)
    state, image = torch.randn(2, generator=generator), torch.rand(3, 32, 32, generator=generator)
    noise = torch.randn(1, policy.config.chunk_size, policy.config.max_action_dim, generator=generator)
    batch = preprocess({"observation.state": state, smolvla_toy.CAMERA: image, "task": smolvla_toy.TASK})
    actions: Tensor = postprocess(policy.predict_action_chunk(batch, noise=noise))
    return actions


def judge(tally: Tally, name: str, command: str, folder: Path, expected: Tensor | None, capsys: Any) -> None:
    """Run the command on a damaged folder; `expected` are the only right actions, None accepts finite ones."""
    flags, find_class = COMMANDS[command]
    output = folder.parent / "output"
    try:
        status = main([*flags, str(folder), "--output", str(output)])
    except BaseException as error:
        tally.unclear.append(f"{command} {name}: {error!r}")
        return
    message = capsys.readouterr().err
    if status == 2:
        if str(folder) in message and not output.exists():
            tally.refused += 1
        else:
            tally.unclear.append(f"{command} {name}: {message}")
        return
    try:
        actions = act(find_class, output)
        works = bool(actions.isfinite().all()) if expected is None else torch.equal(actions, expected)
        found = "acts otherwise"
    except Exception as error:
        works, found = False, repr(error)
    shutil.rmtree(output)
    if works:
        tally.right += 1
    else:
        tally.silent.append(f"{command} {name}: {found}")


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("count", [16, pytest.param(320, marks=pytest.mark.slow)])
def test_no_damage_is_passed_on(count: int, toy_teacher: Path, tmp_path: Path, capsys: Any) -> None:
    seed = 20261122
    dice, tally = random.Random(seed), Tally("damage to a policy that is exported or prepared", seed)
    folder = Path(shutil.copytree(toy_teacher, tmp_path / "policy"))
    expected = {}
    for command, (flags, find_class) in COMMANDS.items():
        assert main([*flags, str(folder), "--output", str(tmp_path / "output")]) == 0
        expected[command] = act(find_class, tmp_path / "output")
        shutil.rmtree(tmp_path / "output")
    capsys.readouterr()
    kinds = ANY_FILE + JSON_FILE
    for number in range(count):
        kind, command = kinds[number % len(kinds)], [*COMMANDS][number % 2]
        files = [file for file in sorted(folder.iterdir()) if kind in mutations_of(file)]
        file = dice.choice(files)
        kind(file, dice)
        name = f"{kind.__name__} {file.name}"
        judge(tally, name, command, folder, None if kind in EDITS else expected[command], capsys)
        restore(folder, toy_teacher)
    with capsys.disabled():
        tally.check(at_least=count)


@pytest.mark.parametrize(
    "drop",
    [
        lambda step: step.pop("state_file"),
        lambda step: step["config"]["features"].pop("action"),
        lambda step: step["config"]["norm_map"].pop("ACTION"),
    ],
)
def test_export_refuses_processors_that_do_not_normalise(
    drop: Callable[[dict[str, Any]], Any], toy_student: Path, tmp_path: Path
) -> None:
    student = Path(shutil.copytree(toy_student, tmp_path / "student"))
    file = student / "policy_postprocessor.json"
    document = json.loads(file.read_text())
    drop(next(step for step in document["steps"] if step["registry_name"] == "unnormalizer_processor"))
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"policy_postprocessor.json does not normalise 'action' by its mean"):
        prepare.export_student(str(student), tmp_path / "exported", 1, "")
    assert not (tmp_path / "exported").exists()
