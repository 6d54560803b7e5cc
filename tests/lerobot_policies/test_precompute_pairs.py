from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from safetensors.torch import load_file, save_file

from hf_memopt.cli import main

couplings_cache = LateModule("hf_memopt.lerobot.couplings.cache")
configuration_smolvla_reflow = LateModule("hf_memopt.lerobot.configuration_smolvla_reflow")
measure = LateModule("hf_memopt.lerobot.evaluate.measure")
modeling_smolvla_reflow = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
pair_key = LateModule("hf_memopt.lerobot.reflow.pair_source")
pair_source = LateModule("hf_memopt.lerobot.reflow.pair_source")
known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
reflow_smolvla = LateModule("hf_memopt.recipes.reflow_smolvla")
datasets = LateModule("lerobot.datasets")
lerobot_runs = LateModule("lerobot_runs")


FEW_STEPS = "--policy.teacher_num_steps=3"
SEEDED = ("--policy.couplings_seed=3", "--policy.couplings_per_frame=2", FEW_STEPS)
EPISODES = ("--dataset.episodes=[0,1]",)
AUGMENTED = ("--dataset.image_transforms.enable=true",)


def precompute(student: Path, dataset: Path, output: Path, *options: str, flags: tuple[str, ...] = SEEDED) -> int:
    training = [f"--policy.path={student}", "--policy.device=cpu", "--policy.push_to_hub=false"]
    return main(["precompute", "--output", str(output), *options, "--", *training, *toy.dataset_flags(dataset), *flags])


@pytest.fixture(scope="module")
def couplings(toy_student: Path, toy_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy teacher's couplings for the 12 frames of two episodes. Read only."""
    folder = tmp_path_factory.mktemp("couplings") / "cache"
    assert precompute(toy_student, toy_dataset, folder, "--shard-size", "10", flags=(*SEEDED, *EPISODES)) == 0
    return folder


@pytest.fixture
def student(toy_student: Path, couplings: Path) -> modeling_smolvla_reflow.SmolVLAReflowPolicy:
    return load_student(toy_student, couplings_path=str(couplings))


@pytest.fixture
def config(toy_student: Path, couplings: Path) -> configuration_smolvla_reflow.SmolVLAReflowConfig:
    return dataclasses.replace(
        policy_files.load_config(toy_student), teacher_num_steps=3, couplings_path=str(couplings)
    )


def load_student(folder: Path, **changes: Any) -> modeling_smolvla_reflow.SmolVLAReflowPolicy:
    config = dataclasses.replace(policy_files.load_config(folder), device="cpu", teacher_num_steps=3, **changes)
    return modeling_smolvla_reflow.SmolVLAReflowPolicy.from_pretrained(folder, config=config).train()


def test_streamed_data_are_refused(toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Any) -> None:
    streaming = (*SEEDED, "--dataset.streaming=true")
    assert precompute(toy_student, toy_dataset, tmp_path / "couplings", flags=streaming) == 2
    assert "dataset.streaming=true: couplings are of numbered frames" in capsys.readouterr().err
    assert not (tmp_path / "couplings").exists()


def orphan(student: Path, tmp_path: Path) -> Path:
    """Write a student whose teacher does not exist."""
    folder = Path(shutil.copytree(student, tmp_path / "orphan"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "teacher_model_path": str(tmp_path / "gone")}))
    return folder


def check(config: configuration_smolvla_reflow.SmolVLAReflowConfig, dataset: Path) -> None:
    pair_source.CachedPairs(config).check(datasets.LeRobotDatasetMetadata(toy.REPO_ID, root=dataset).stats, dataset)


# ------------------------------------------------------------------------------------------------ the same training


def test_the_folder_says_what_it_holds(couplings: Path) -> None:
    cache = couplings_cache.CouplingCache(couplings)
    assert sorted(cache.indices) == list(range(12))
    described = cache.description
    assert (described["solver"], described["num_steps"], described["seed"]) == ("euler", 3, 3)
    assert (described["num_draws"], described["num_shards"], described["shared_prefix"]) == (2, 3, True)
    assert described["shape"] == [6, 4]


def test_a_teacher_in_its_checkpoints_files_gives_the_same_pairs(
    couplings: Path, toy_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    flags = (*SEEDED, *EPISODES, "--policy.teacher_home=file", "--policy.teacher_offload=stream")
    assert precompute(toy_student, toy_dataset, tmp_path / "cache", "--shard-size", "10", flags=flags) == 0
    shards = {file.name for file in couplings.rglob("*.arrow")}  # each with its digest in its name
    assert len(shards) == 3
    assert {file.name for file in (tmp_path / "cache").rglob("*.arrow")} == shards


def test_a_teacher_from_the_hub_gives_the_same_pairs(
    couplings: Path, toy_student: Path, toy_teacher: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("hf_memopt.lerobot.files.policy_files.snapshot_download", lambda *_, **__: str(toy_teacher))
    flags = (*SEEDED, *EPISODES, "--policy.teacher_model_path=toy/teacher")
    assert precompute(toy_student, toy_dataset, tmp_path / "cache", "--shard-size", "10", flags=flags) == 0
    assert (
        couplings_cache.CouplingCache(tmp_path / "cache").description
        == couplings_cache.CouplingCache(couplings).description
    )


def test_training_from_the_folder_is_training_online_and_needs_no_teacher(
    couplings: Path, toy_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    logs = {}
    for name, start, flags in (
        ("online", toy_student, SEEDED),
        ("cached", orphan(toy_student, tmp_path), (f"--policy.couplings_path={couplings}",)),
    ):
        short = lerobot_runs.train_flags(start, toy_dataset, tmp_path / name, steps=3, batch_size=4)
        logs[name] = lerobot_runs.run(reflow_smolvla.main, *short, *EPISODES, *flags)
    assert lerobot_runs.logged(logs["online"], "loss") == lerobot_runs.logged(logs["cached"], "loss")
    online, cached = lerobot_runs.weights(tmp_path / "online"), lerobot_runs.weights(tmp_path / "cached")
    assert all(torch.equal(online[name], cached[name]) for name in online)
    assert not torch.equal(
        online["model.action_out_proj.weight"], lerobot_runs.weights(toy_student)["model.action_out_proj.weight"]
    )
    assert "weights were not compared" in logs["cached"]


@pytest.mark.parametrize("share_prefix", ["auto", "off"])
def test_a_frames_pair_depends_on_the_frame_alone(toy_student: Path, toy_dataset: Path, share_prefix: str) -> None:
    """Compare in batches of other frames, under autocast, and with padding behind the instruction."""
    policy = load_student(toy_student, couplings_seed=3, teacher_offload="swap", share_prefix=share_prefix)
    (batch,) = measure.held_out_batches(toy_student, toy.REPO_ID, toy_dataset, [1], batch_size=5, max_observations=5)
    together = pairs_of(policy, batch)
    policy(batch)
    assert policy.teacher.report().device_bytes == 0  # no fetch after the student's forward
    reverse = {key: value.flip(0) for key, value in batch.items() if isinstance(value, torch.Tensor)}
    for key in ("observation.language.tokens", "observation.language.attention_mask"):
        reverse[key] = torch.cat([reverse[key], torch.zeros_like(reverse[key][:, :3])], dim=1)
    inputs = pair_key.coupling_inputs(policy.config, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reversed_pairs = pairs_of(policy, reverse)
        solved = ask(policy, inputs, together.noise)
    assert torch.equal(solved, ask(policy, inputs, together.noise))
    assert torch.equal(reversed_pairs.noise.flip(0), together.noise)
    assert torch.equal(reversed_pairs.target.flip(0), together.target)
    solved = policy.generate_reflow_target(*_arguments(policy, batch), together.noise)
    torch.testing.assert_close(together.target, solved, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_larger_batch_gives_the_same_couplings_up_to_rounding(
    couplings: Path, toy_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    precompute(toy_student, toy_dataset, tmp_path / "cache", "--batch-size", "16", flags=(*SEEDED, *EPISODES))
    single, batched = couplings_cache.CouplingCache(couplings), couplings_cache.CouplingCache(tmp_path / "cache")
    for draw in range(2):
        targets = [rows(cache, batched.indices, draw) for cache in (single, batched)]
        torch.testing.assert_close(*targets, rtol=1e-5, atol=1e-5)


def test_each_frame_gets_its_own_draws(toy_student: Path, toy_dataset: Path) -> None:
    student = load_student(toy_student, couplings_seed=3, couplings_per_frame=2)
    batch = {"index": torch.tensor([4, 4, 4, 4, 4, 4, 4, 9]), "observation.state": torch.zeros(8, 4)}
    torch.manual_seed(0)
    noise = student.pair_source.draw(student, batch, None).noise
    assert len({tuple(row.flatten().tolist()) for row in noise}) == 3


def test_copies_and_pickles_open_the_folder_anew(
    student: modeling_smolvla_reflow.SmolVLAReflowPolicy, toy_student: Path, toy_dataset: Path
) -> None:
    (batch,) = measure.held_out_batches(toy_student, toy.REPO_ID, toy_dataset, [0], max_observations=3)
    losses = []
    for twin in (student, copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
        torch.manual_seed(0)
        losses.append(twin(batch)[0])
        assert twin.teacher.report() is None
    assert losses[0] == losses[1] == losses[2]


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_num_steps": 4}, "num_steps is 3 there and 4 here"),
        ({"teacher_num_steps": None}, "num_steps is 3 there and 10 here"),
        ({"teacher_dtype": "bfloat16"}, "dtype is 'as saved' there and 'bfloat16' here"),
        ({"couplings_seed": 4}, "seed is 3 there and 4 here"),
        ({"couplings_per_frame": 1}, "num_draws is 2 there and 1 here"),
        ({"tokenizer_max_length": 40}, "preprocessing is"),
        ({"resize_imgs_with_padding": (64, 64)}, "preprocessing is"),
    ],
)
def test_stale_couplings_are_refused_by_field(
    config: configuration_smolvla_reflow.SmolVLAReflowConfig, toy_dataset: Path, changes: dict[str, Any], message: str
) -> None:
    check(config, toy_dataset)
    with pytest.raises(ValueError, match=message):
        check(dataclasses.replace(config, **changes), toy_dataset)


def test_another_teacher_is_refused(
    config: configuration_smolvla_reflow.SmolVLAReflowConfig, toy_teacher: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    teacher = Path(shutil.copytree(toy_teacher, tmp_path / "teacher"))
    file = teacher / "model.safetensors"
    tensors = load_file(file)
    tensors["model.action_out_proj.bias"][0] += 1e-6
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"weights is '.*…' there and '.*…' here"):
        check(dataclasses.replace(config, teacher_model_path=str(teacher)), toy_dataset)


def test_other_data_is_refused(
    config: configuration_smolvla_reflow.SmolVLAReflowConfig, toy_dataset: Path, tmp_path: Path
) -> None:
    dataset = Path(shutil.copytree(toy_dataset, tmp_path / "dataset"))
    table = next((dataset / "data").rglob("*.parquet"))
    table.write_bytes(table.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match="dataset is"):
        check(config, dataset)
    stats = copy.deepcopy(datasets.LeRobotDatasetMetadata(toy.REPO_ID, root=toy_dataset).stats)
    stats["action"]["mean"][0] += 1e-3
    with pytest.raises(ValueError, match="preprocessing is"):
        pair_source.CachedPairs(config).check(stats, toy_dataset)


def test_training_refuses_them_before_the_first_step(
    couplings: Path, toy_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    flags = lerobot_runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=1)
    with pytest.raises(ValueError, match="seed is 3 there and 4 here"):
        lerobot_runs.run(
            reflow_smolvla.main, *flags, f"--policy.couplings_path={couplings}", "--policy.couplings_seed=4"
        )


def test_noise_cannot_be_given_as_well(student: modeling_smolvla_reflow.SmolVLAReflowPolicy, toy_dataset: Path) -> None:
    with pytest.raises(ValueError, match="noise was given"):
        student({}, noise=torch.zeros(1))
    with pytest.raises(ValueError, match="there is no teacher to ask"):
        student.generate_reflow_target([], [], *(torch.zeros(1) for _ in range(4)))
    with pytest.raises(ValueError, match="no 'index'"):
        student({"observation.state": torch.zeros(1, 2)})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--policy.reflow_target=self", "--policy.reflow_real_data=0.5"),
            "precompute needs a teacher with weights of its own",
        ),
        (("--policy.couplings_path=somewhere",), "and no couplings to read"),
        (("--policy.use_reflow=false",), "name no student"),
    ],
)
def test_precompute_refuses_flags_without_a_teacher(
    flags: tuple[str, ...], message: str, toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Any
) -> None:
    assert precompute(toy_student, toy_dataset, tmp_path / "cache", flags=flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


# ------------------------------------------------------------------------------------------------ augmentation


def test_random_augmentation_is_refused_by_precompute_and_by_training(
    couplings: Path, toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Any
) -> None:
    assert precompute(toy_student, toy_dataset, tmp_path / "cache", flags=AUGMENTED) == 2
    assert "augmented at random" in capsys.readouterr().err
    flags = lerobot_runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=1)
    with pytest.raises(ValueError, match=r"observation of sample \d+ is not the one .*random augmentation"):
        lerobot_runs.run(
            reflow_smolvla.main, *flags, *AUGMENTED, *EPISODES, FEW_STEPS, f"--policy.couplings_path={couplings}"
        )


def test_stored_observations_may_be_augmented(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    flags = (*AUGMENTED, "--dataset.episodes=[0]", FEW_STEPS)
    assert precompute(toy_student, toy_dataset, folder, "--store-observations", flags=flags) == 0
    student = load_student(toy_student, couplings_path=str(folder))
    (batch,) = measure.held_out_batches(toy_student, toy.REPO_ID, toy_dataset, [0], max_observations=4)
    seen, noise, target, *_ = student.pair_source.draw(student, batch, None)
    assert not torch.equal(seen[toy.CAMERA], batch[toy.CAMERA])
    teacher = load_student(toy_student, couplings_seed=0)
    torch.testing.assert_close(ask(teacher, seen, noise), target, rtol=1e-5, atol=1e-5)
    assert (ask(teacher, batch, noise) - target).abs().max() > 1e-4
    assert student(batch)[0].isfinite()


def rows(cache: couplings_cache.CouplingCache, indices: list[int], draw: int) -> torch.Tensor:
    """Skip the check of the student's observations."""
    cache._check_observations = lambda *_: None
    return cache.of(indices, [draw] * len(indices), {}).target


def pairs_of(policy: modeling_smolvla_reflow.SmolVLAReflowPolicy, batch: Any) -> pair_source.Pairs:
    policy.load_teacher_model()
    drawn = policy.pair_source.draw(policy, batch, None)
    if drawn.target is not None:
        return drawn
    return policy.pair_source.complete(drawn, policy, known_flows.observe(policy, batch), None)


def ask(policy: modeling_smolvla_reflow.SmolVLAReflowPolicy, inputs: Any, noise: torch.Tensor) -> torch.Tensor:
    return pair_source.solve(policy, inputs, noise)


def _arguments(policy: modeling_smolvla_reflow.SmolVLAReflowPolicy, batch: Any) -> Any:
    return known_flows.observe(policy, batch).arguments()
