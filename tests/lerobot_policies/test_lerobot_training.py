import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from late_imports import LateModule
from patience import HANG_S
from safetensors.torch import load_file

utils = LateModule("draccus.utils")
smolvla_toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
train_utils = LateModule("lerobot.common.train_utils")
configs = LateModule("lerobot.configs")
lerobot_dataset = LateModule("lerobot.datasets.lerobot_dataset")
policies = LateModule("lerobot.policies")
factory = LateModule("lerobot.policies.factory")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")
lerobot_script = LateModule("lerobot.scripts.lerobot_train")
random_utils = LateModule("lerobot.utils.random_utils")
lerobot_runs = LateModule("lerobot_runs")


TRAINED = ("lm_expert", "action_", "state_proj")


def train(student: Path, dataset: Path, output: Path, *flags: str, steps: int = 2) -> str:
    return lerobot_runs.run(
        lerobot_runs.lerobot_train,
        lerobot_runs.PLUGIN,
        *lerobot_runs.train_flags(student, dataset, output, steps=steps),
        *flags,
    )


def resume(checkpoint: Path, *flags: str) -> str:
    config = checkpoint / "pretrained_model" / "train_config.json"
    return lerobot_runs.run(
        lerobot_runs.lerobot_train, lerobot_runs.PLUGIN, f"--config_path={config}", "--resume=true", *flags
    )


def test_trains_the_expert_and_leaves_the_frozen_model(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    log = train(toy_student, toy_dataset, tmp_path / "run", "--dataset.eval_split=0.25", "--eval_steps=1")
    before, after = lerobot_runs.weights(toy_student), lerobot_runs.weights(tmp_path / "run")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(any(part in name for part in TRAINED) for name in moved), moved
    assert {name.split(".")[1] for name in moved} >= {"vlm_with_expert", "state_proj", "action_out_proj"}
    assert len(lerobot_runs.logged(log, "loss")) == 2
    assert log.count("eval_loss=") == 2


@pytest.mark.parametrize("use_reflow", [True, False])
@pytest.mark.sweep(share=0.5)
def test_memory_by_phase_reaches_the_log_and_wandb(
    use_reflow: bool, toy_student: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check backward and optimizer from the second batch on: a batch logs the previous batch's."""
    sent: dict[int, dict[str, float]] = {}
    service = SimpleNamespace(id="run", get_url=lambda: "")
    wandb = SimpleNamespace(init=lambda **settings: None, run=service, log=lambda data, step: sent.update({step: data}))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = ("--wandb.enable=true", "--wandb.disable_artifact=true", f"--policy.use_reflow={str(use_reflow).lower()}")
    log = train(toy_student, toy_dataset, tmp_path / "run", *flags)
    of_teacher = {"memory/prefix_host_rss_gib", "memory/teacher_host_rss_gib", "memory/teacher_own_gib"}
    first = {"memory/forward_host_rss_gib", *(of_teacher if use_reflow else ())}
    later = {*first, "memory/backward_host_rss_gib", "memory/optimizer_host_rss_gib"}
    for step, names in ((1, first), (2, later)):
        figures = {name: gib for name, gib in sent[step].items() if name.startswith("train/memory/")}
        assert figures.keys() == {f"train/{name}" for name in names}
        assert all(0 < gib < 1000 for gib in figures.values())
    for name in later:
        logged = lerobot_runs.logged(log, name)
        assert logged[-1] == pytest.approx(sent[2][f"train/{name}"], abs=5e-4)
        assert len(logged) == (2 if name in first else 1)


def test_checkpoint_holds_the_teachers_keys_and_stock_tools_load_it(
    toy_student: Path, toy_teacher: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    train(toy_student, toy_dataset, tmp_path / "run", steps=1)
    checkpoint = tmp_path / "run" / "checkpoints" / "last" / "pretrained_model"
    assert lerobot_runs.weights(checkpoint).keys() == lerobot_runs.weights(toy_teacher).keys()
    config = configs.PreTrainedConfig.from_pretrained(checkpoint)
    policy = factory.get_policy_class(config.type).from_pretrained(checkpoint, strict=True)
    stock = modeling_smolvla.SmolVLAPolicy.from_pretrained(checkpoint, config=config, strict=True)
    preprocess, postprocess = policies.make_pre_post_processors(config, pretrained_path=str(checkpoint))
    batch = preprocess(toy_frame(toy_dataset))
    noise = torch.randn(1, config.chunk_size, config.max_action_dim)
    actions = policy.predict_action_chunk(dict(batch), noise=noise)
    assert torch.equal(actions, stock.predict_action_chunk(dict(batch), noise=noise))
    assert postprocess(actions).shape == (1, config.chunk_size, 2)


def toy_frame(dataset: Path) -> dict[str, Any]:
    frame = lerobot_dataset.LeRobotDataset("local/toy", root=dataset)[5]
    return {key: frame[key] for key in ("observation.state", "observation.images.top", "task")}


@pytest.mark.slow
def test_new_process_finds_the_policy_and_resumes(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    """Run the command in an interpreter that knows the plugin only from its flag."""
    train(toy_student, toy_dataset, tmp_path / "run", "--save_freq=1", steps=2)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "000002")
    config = tmp_path / "run" / "checkpoints" / "000001" / "pretrained_model" / "train_config.json"
    result = subprocess.run(
        [
            Path(sys.executable).parent / "lerobot-train",
            lerobot_runs.PLUGIN,
            f"--config_path={config}",
            "--resume=true",
        ],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert lerobot_runs.logged(result.stderr, "step") == [2]
    assert lerobot_runs.logged(result.stderr, "memory/teacher_own_gib")
    assert lerobot_runs.weights(tmp_path / "run").keys() == lerobot_runs.weights(toy_student).keys()


@pytest.fixture
def exact_resume(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Restore the generators after the epoch's draw: lerobot restores them before, so its resumes change noise."""
    cycle = lerobot_script.cycle

    def restore_from(training_state: Path) -> None:
        def cycle_then_restore(loader: Any) -> Iterator[Any]:
            batches = cycle(loader)
            first = next(batches)
            random_utils.load_rng_state(training_state)
            yield first
            yield from batches

        monkeypatch.setattr("lerobot.scripts.lerobot_train.cycle", cycle_then_restore)

    return restore_from


@pytest.mark.parametrize("kind", [pytest.param("smolvla", marks=pytest.mark.slow), "smolvla_reflow"])
def test_resumed_run_equals_uninterrupted_one(
    kind: str,
    toy_teacher: Path,
    toy_student: Path,
    toy_dataset: Path,
    tmp_path: Path,
    exact_resume: Callable[[Path], None],
) -> None:
    """Compare weights and optimizer state bitwise, which needs `exact_resume`."""
    start = toy_teacher if kind == "smolvla" else toy_student
    # Two steps after the resume: the first loads the teacher, and a moved generator would show in the second's draws.
    train(start, toy_dataset, tmp_path / "run", "--save_freq=2", steps=4)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "000004").rename(tmp_path / "uninterrupted")
    exact_resume(checkpoints / "000002" / "training_state")
    resume(checkpoints / "000002")
    for file in ("pretrained_model/model.safetensors", "training_state/optimizer_state.safetensors"):
        ours, expected = load_file(checkpoints / "last" / file), load_file(tmp_path / "uninterrupted" / file)
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], expected[name]) for name in ours)


@pytest.mark.slow
def test_resume_continues(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check data order, schedule and optimizer, exact with draws that depend on the frame alone."""
    lerobot_runs.pin_draws(monkeypatch)
    checkpoints = tmp_path / "run" / "checkpoints"
    train(toy_student, toy_dataset, tmp_path / "run", "--save_freq=2", steps=4)
    expected, halfway = (
        lerobot_runs.weights(tmp_path / "run"),
        lerobot_runs.weights(checkpoints / "000002" / "pretrained_model"),
    )
    shutil.rmtree(checkpoints / "000004")
    log = resume(checkpoints / "000002")
    assert lerobot_runs.logged(log, "step") == [3, 4]
    assert train_utils.load_training_step(checkpoints / "000004" / "training_state") == 4
    resumed = lerobot_runs.weights(tmp_path / "run")
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    assert not torch.equal(resumed["model.action_out_proj.weight"], halfway["model.action_out_proj.weight"])


def test_use_reflow_false_is_stock_training(
    toy_student: Path, toy_teacher: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    train(toy_student, toy_dataset, tmp_path / "plain", "--policy.use_reflow=false")
    train(toy_teacher, toy_dataset, tmp_path / "stock")
    plain, stock = lerobot_runs.weights(tmp_path / "plain"), lerobot_runs.weights(tmp_path / "stock")
    assert all(torch.equal(plain[name], stock[name]) for name in stock)


@pytest.mark.parametrize(
    "setting", ["teacher_offload=swap", "teacher_dtype=bfloat16", "share_prefix=off", "activation_offload=auto"]
)
@pytest.mark.sweep(share=0.4)
def test_trains_with(setting: str, toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    log = train(toy_student, toy_dataset, tmp_path / "run", f"--policy.{setting}", steps=1)
    assert 0 < lerobot_runs.logged(log, "loss")[0] < 1
    name, value = setting.split("=")
    saved = json.loads((tmp_path / "run/checkpoints/last/pretrained_model/config.json").read_text())
    assert saved[name] == value


BAD_FLAGS = {
    "teacher_offload": ("disk", "auto, resident, swap, stream"),
    "teacher_model_path": ("/nowhere/teacher", "pass the pretrained_model folder"),
    "use_cache": ("false", "set --policy.use_cache=true"),
}


@pytest.mark.parametrize("field", BAD_FLAGS)
def test_refuses_bad_flag(field: str, toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    value, remedy = BAD_FLAGS[field]
    message = refusal(toy_student, toy_dataset, tmp_path / "run", f"--policy.{field}={value}")
    assert field in message or field == "teacher_model_path"
    assert value in message
    assert remedy in message


def refusal(student: Path, dataset: Path, output: Path, *flags: str) -> str:
    """Return the error's and its causes' messages, before any output."""
    with pytest.raises((ValueError, utils.ParsingError)) as caught:
        train(student, dataset, output, *flags)
    assert not output.exists()
    error: BaseException | None = caught.value
    messages = []
    while error is not None:
        messages.append(str(error))
        error = error.__cause__
    return "\n".join(messages)


def test_refuses_share_prefix_on_where_it_cannot_be_had(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    flags = ("--policy.share_prefix=on", "--policy.train_expert_only=false")
    message = refusal(toy_student, toy_dataset, tmp_path / "run", *flags)
    assert "share_prefix=on cannot be had" in message
    assert "--policy.train_expert_only=true" in message


def test_refuses_data_with_other_statistics(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    """Check where lerobot would silently give the student another normaliser than the teacher's."""
    shifted = shutil.copytree(toy_dataset, tmp_path / "shifted")
    stats = json.loads((shifted / "meta" / "stats.json").read_text())
    before = stats["action"]["mean"]
    stats["action"]["mean"] = [value + 5 for value in before]
    (shifted / "meta" / "stats.json").write_text(json.dumps(stats))
    message = refusal(toy_student, shifted, tmp_path / "run")
    assert "'action'" in message
    for values in (before, stats["action"]["mean"]):
        assert str([round(value, 4) for value in values]) in message
    assert "the dataset that the teacher was trained on" in message


@pytest.mark.parametrize(
    ("feature", "remedy"),
    [
        ("action", r"student \(3,\), teacher \(2,\).*use data with the same features"),
        ("observation.state", r"Reflow on the dataset that the teacher was trained on"),
    ],
)
def test_refuses_data_of_another_dimension(
    feature: str, remedy: str, toy_student: Path, other_dataset: Callable[[str], Path], tmp_path: Path
) -> None:
    message = refusal(toy_student, other_dataset(feature), tmp_path / "run")
    assert feature in message
    assert re.search(remedy, message), message


@pytest.fixture
def other_dataset(toy_dataset: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A constructor of datasets with three instead of two dimensions in one feature."""

    def make(feature: str) -> Path:
        sizes = {"action": 2, "observation.state": 2, feature: 3}
        features: dict[str, Any] = {
            name: {"dtype": "float32", "shape": (size,), "names": list("xyz"[:size])} for name, size in sizes.items()
        }
        shape = (smolvla_toy.IMAGE_SIZE, smolvla_toy.IMAGE_SIZE, 3)
        features[smolvla_toy.CAMERA] = {"dtype": "image", "shape": shape, "names": ["height", "width", "channels"]}
        dataset = lerobot_dataset.LeRobotDataset.create(
            "local/other", fps=10, features=features, root=tmp_path / "other"
        )
        image = np.zeros(shape, dtype=np.uint8)
        for step in range(3):
            vectors = {name: np.full(size, step, dtype=np.float32) for name, size in sizes.items()}
            dataset.add_frame({**vectors, smolvla_toy.CAMERA: image, "task": "anything"})
        dataset.save_episode()
        dataset.finalize()
        return tmp_path / "other"

    return make
