"""Tests of policies that lerobot trains by `--peft.*`: as students, as teachers, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from safetensors.torch import load_file
from torch import Tensor

from hf_memopt.cli import main

pytestmark = pytest.mark.e2e

runs = LateModule("lerobot_runs")
adapters = LateModule("hf_memopt.lerobot.files.checkpoint_files")
factory = LateModule("lerobot.policies.factory")
lerobot_configs = LateModule("lerobot.configs")
lerobot_train = LateModule("lerobot.scripts.lerobot_train")
peft = LateModule("peft")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
prepare = LateModule("hf_memopt.lerobot.student.prepare")
processors = LateModule("hf_memopt.lerobot.files.checkpoint_files")
recipe = LateModule("hf_memopt.recipes.reflow_smolvla")
lerobot_datasets = LateModule("lerobot.datasets")

B = "base_model.model.model.state_proj.lora_B.weight"
LORA = ("--peft.method_type=LORA", "--peft.r=4", "--policy.optimizer_lr=0.01")
# Merging adds the product of the factors to a weight, where PEFT adds their outputs: float32 rounding of another order.
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def student(toy_student: Path, toy_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with an adapter on a student, with two checkpoints."""
    output = tmp_path_factory.mktemp("lora") / "student"
    flags = runs.train_flags(toy_student, toy_dataset, output, steps=4)
    runs.run(recipe.main, *flags, *LORA, "--save_freq=2")
    return output


@pytest.fixture(scope="module")
def teacher(toy_teacher: Path, toy_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock policy's adapter, trained by lerobot alone."""
    output = tmp_path_factory.mktemp("lora") / "teacher"
    flags = runs.train_flags(toy_teacher, toy_dataset, output, steps=3)
    runs.run(lerobot_train.main, *flags, *LORA)
    return policy_files.resolve_checkpoint(output)


def stock_policy(folder: Path, dataset: Path) -> Any:
    """Return a policy as lerobot makes it for evaluation, with PEFT's wrapper around an adapter's."""
    config = lerobot_configs.PreTrainedConfig.from_pretrained(folder)
    config.pretrained_path, config.device = folder, "cpu"
    metadata = lerobot_datasets.LeRobotDatasetMetadata(dataset.name, root=dataset)
    return factory.make_policy(config, ds_meta=metadata).eval()


def actions(policy: Any, folder: Path) -> Tensor:
    """Return a chunk for zeros and fixed noise, normalised."""
    config = policy_files.load_config(folder)
    preprocess, _ = processors.load_processors(config, folder, {"device_processor": {"device": "cpu"}})
    noise = torch.randn(1, config.chunk_size, config.max_action_dim, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: Tensor = policy.predict_action_chunk(processors.blank_observation(config, preprocess), noise=noise)
    return found


def test_an_adapter_is_merged_as_peft_applies_it(teacher: Path, toy_teacher: Path, toy_dataset: Path) -> None:
    merged = policy_files.load_policy(teacher)
    assert not isinstance(merged, peft.PeftModel)
    applied = stock_policy(teacher, toy_dataset)
    assert isinstance(applied, peft.PeftModel)
    theirs, base = actions(applied, teacher), actions(policy_files.load_policy(toy_teacher), toy_teacher)
    torch.testing.assert_close(actions(merged, teacher), theirs, **ROUNDING)
    assert (theirs - base).abs().max() > 1e-3, "the adapter has learned"


def test_a_student_of_an_adapter_starts_as_its_merged_copy(teacher: Path, toy_dataset: Path, tmp_path: Path) -> None:
    output = tmp_path / "student"
    assert main(["prepare-student", "--teacher", str(teacher), "--output", str(output)]) == 0
    config = policy_files.load_config(output)
    assert (config.type, config.use_peft, config.teacher_model_path) == (
        "smolvla_reflow",
        False,
        str(teacher.resolve()),
    )
    merged = policy_files.load_policy(teacher).state_dict()
    assert all(torch.equal(merged[name], weight) for name, weight in runs.weights(output).items())
    flags = runs.train_flags(output, toy_dataset, tmp_path / "run", steps=2)
    log = runs.run(recipe.main, *flags)
    assert len(runs.logged(log, "loss")) == 2


def test_evaluate_measures_a_student_with_an_adapter(student: Path, tmp_path: Path) -> None:
    flags = ["--policy", str(student), "--output", str(tmp_path / "measured"), "--num-steps", "1", "--episodes", "0"]
    assert main(["evaluate", *flags]) == 0
    flags = ["--policy", str(student), "--output", str(tmp_path / "out"), "--evaluation", str(tmp_path / "measured")]
    assert main(["export", *flags]) == 0
    assert "On 6 observations from 1 episode of" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("flags", [[], ["--adapter-only"]])
def test_export_is_a_stock_policy(flags: list[str], student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    output = tmp_path / "exported"
    assert main(["export", "--policy", str(student), "--output", str(output), "--no-evaluation", *flags]) == 0
    config = lerobot_configs.PreTrainedConfig.from_pretrained(output)
    assert (config.type, config.num_steps, config.use_peft) == ("smolvla", 1, bool(flags))
    assert (output / "model.safetensors").exists() != adapters.is_adapter(output)
    exported = stock_policy(output, toy_dataset)
    assert isinstance(exported, peft.PeftModel) == bool(flags)
    mine = policy_files.load_policy(policy_files.resolve_checkpoint(student), num_steps=1)
    torch.testing.assert_close(actions(exported, output), actions(mine, output), **ROUNDING)


def test_a_run_with_an_adapter_goes_on_as_the_uninterrupted_one(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.pin_draws(monkeypatch)
    output = tmp_path / "run"
    runs.run(recipe.main, *runs.train_flags(toy_student, toy_dataset, output, steps=4), *LORA, "--save_freq=2")
    weights = output / "checkpoints" / "last" / "pretrained_model" / adapters.ADAPTER_WEIGHTS_FILE
    uninterrupted = load_file(weights)
    halfway = output / "checkpoints" / "000002" / "pretrained_model"
    assert not torch.equal(*(load_file(each)[B] for each in (weights, halfway / weights.name)))
    runs.run(recipe.main, f"--config_path={halfway / 'train_config.json'}", "--resume=true")
    resumed = load_file(weights)
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)


def test_couplings_know_an_adapters_weights(teacher: Path, toy_teacher: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    assert policy_files.weights_digest(copy) == policy_files.weights_digest(teacher)
    assert policy_files.weights_digest(teacher) != policy_files.weights_digest(toy_teacher)
    settings = json.loads((copy / adapters.ADAPTER_CONFIG_FILE).read_text())
    (copy / adapters.ADAPTER_CONFIG_FILE).write_text(json.dumps({**settings, "lora_alpha": 3}))
    assert policy_files.weights_digest(copy) != policy_files.weights_digest(teacher)


def without_base(folder: Path) -> None:
    _change(folder, base_model_name_or_path=None)


def with_a_lost_base(folder: Path) -> None:
    _change(folder, base_model_name_or_path="/nowhere/policy")


def with_another_rank(folder: Path) -> None:
    _change(folder, r=2)


def with_fewer_targets(folder: Path) -> None:
    _change(folder, target_modules=r"model\.state_proj")


def truncated(folder: Path) -> None:
    file = folder / adapters.ADAPTER_WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:20])


def without_weights(folder: Path) -> None:
    (folder / adapters.ADAPTER_WEIGHTS_FILE).unlink()


def _change(folder: Path, **fields: Any) -> None:
    file = folder / adapters.ADAPTER_CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


REFUSED: dict[Callable[[Path], None], str] = {
    without_base: r"adapter_config.json names no base policy; write its folder or hub id into base_model_name_or_path",
    with_a_lost_base: r"the base policy of the adapter in .* cannot be found: '/nowhere/policy' is neither",
    with_another_rank: r"the adapter in .* does not fit its base policy: (?s:.*)size mismatch",
    with_fewer_targets: r"the adapter in .* does not fit its base policy: .* is on one side alone",
    truncated: r"adapter_model.safetensors is truncated or damaged",
    without_weights: r"has no adapter_model.safetensors; pass a complete checkpoint folder",
}


@pytest.mark.parametrize("damage", REFUSED, ids=lambda damage: damage.__name__)
def test_a_damaged_adapter_is_refused_in_one_line(
    damage: Callable[[Path], None], teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(teacher, tmp_path / "teacher")
    damage(tmp_path / "teacher")
    capsys.readouterr()
    assert main(["prepare-student", "--teacher", str(tmp_path / "teacher"), "--output", str(tmp_path / "out")]) == 2
    with pytest.raises(ValueError, match=REFUSED[damage]):
        prepare.prepare_student(str(tmp_path / "teacher"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_whole_weights_are_no_adapter(toy_student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--policy", str(toy_student), "--output", str(tmp_path / "out"), "--no-evaluation", "--adapter-only"]
    assert main(["export", *flags]) == 2
    assert "holds whole weights and no adapter; leave --adapter-only out" in capsys.readouterr().err
