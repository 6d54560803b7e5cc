"""lerobot's configuration of a run from a spec: overrides, refusals, features, and the autocast of lerobot's script."""

from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

from hf_memopt.planning import Job
from hf_memopt.planning.workloads.robot_policies import policy_file

policy_toys = LateModule("policy_toys")
training_config = LateModule("hf_memopt.planning.workloads.policy_run")
NONE = {"input_features": {}, "output_features": {}}


def config(model: Path, **said: Any) -> Any:
    file = policy_file(str(model))
    assert file is not None
    return training_config.training_config(Job(str(model), **said), file)


@pytest.fixture
def run(toy_vlm: Path, toy_dataset: Path, tmp_path: Path) -> Path:
    path: Path = policy_toys.write_run(tmp_path, "smolvla", toy_vlm, toy_dataset)
    return path


def test_a_run_keeps_what_the_spec_does_not_say(run: Path) -> None:
    cfg = config(run)
    assert (cfg.batch_size, cfg.steps, cfg.peft) == (2, 2, None)
    assert (cfg.policy.chunk_size, cfg.policy.pretrained_path) == (6, None)
    assert (cfg.optimizer.type, cfg.optimizer.grad_clip_norm) == ("adamw", 10)
    assert cfg.scheduler.type == "cosine_decay_with_warmup"
    assert (cfg.output_dir, cfg.resume) == (None, False)


def test_a_runs_folder_is_a_policy_to_go_on_from(run: Path) -> None:
    cfg = config(run.parent, lora_rank=4)
    assert (cfg.batch_size, cfg.peft.r, cfg.policy.pretrained_path) == (2, 4, run.parent)


def test_fields_of_the_spec_and_flags_of_lerobot_win(run: Path) -> None:
    said = {"batch_size": 3, "lora_rank": 4, "lora_targets": "q_proj,v_proj", "freeze_vision_tower": True}
    cfg = config(run, **said, set=["policy.freeze_vision_encoder=false", "policy.train_expert_only=false", "steps=9"])
    assert (cfg.batch_size, cfg.steps) == (3, 9)
    assert (cfg.peft.r, cfg.peft.target_modules) == (4, ["q_proj", "v_proj"])
    assert (cfg.policy.freeze_vision_encoder, cfg.policy.train_expert_only) == (True, False)


def test_a_policy_alone_has_lerobots_defaults(toy_vlm: Path, tmp_path: Path) -> None:
    folder = policy_toys.write_policy(tmp_path / "policy", "pi05", toy_vlm)
    cfg = config(folder, dtype="bfloat16", checkpointing="full", lora_targets="all-linear", effective_batch=4)
    assert (cfg.batch_size, cfg.policy.pretrained_path, cfg.dataset.repo_id) == (4, folder, "DATASET")
    assert (cfg.policy.dtype, cfg.policy.gradient_checkpointing) == ("bfloat16", True)
    assert (cfg.peft.target_modules, cfg.peft.r) == ("all-linear", 16)
    assert config(folder / "config.json").policy.pretrained_path == folder
    assert config(folder).batch_size == 8


def test_an_optimizer_of_the_runs_own_stays(run: Path) -> None:
    own = ["use_policy_training_preset=false", "optimizer.type=sgd", "scheduler.type=diffuser"]
    cfg = config(run, set=[*own, "scheduler.name=cosine", "scheduler.num_warmup_steps=1"])
    assert cfg.optimizer.type == "sgd"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quantize": "nf4"}, r"^quantize=nf4: lerobot's training has no such setting; its own go by set=NAME=VALUE"),
        ({"num_gpus": 2}, "^num_gpus=2: a policy's training is simulated on one GPU"),
        ({"accumulation": 2}, "^accumulation=2: lerobot updates after each batch"),
        ({"batch_size": 2, "effective_batch": 4}, "^effective_batch=4: lerobot updates after each batch, of"),
        ({"dtype": "bfloat16"}, "^dtype=bfloat16: policies of type 'smolvla' have no field dtype"),
        ({"checkpointing": "full"}, "^checkpointing=full: policies of type 'smolvla' have no field gradient_ch"),
        ({"checkpointing": "selective"}, "^checkpointing='selective': lerobot's policies checkpoint all"),
        ({"set": ["policy.chunk=3"]}, r"^lerobot does not read .* with --policy.chunk=3: unrecognized arguments"),
        ({"set": ["policy.compile_model=true"]}, "^policy.compile_model is set: such a run is not simulated, since"),
        ({"set": ["policy.use_peft=true"]}, "^policy.use_peft is set: such a run is not simulated, since"),
        ({"set": ["policy.vlm_model_name=no/vlm"]}, "^policy.vlm_model_name='no/vlm': the VLM's config.json, "),
    ],
)  # fmt: skip
def test_other_runs_are_refused(said: dict[str, Any], message: str, run: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config(run, **said)


@pytest.mark.parametrize(
    ("kind", "also"), [("groot", ""), ("smolvla_reflow", "; for a student of reflow use --recipe"), ("mine", "")]
)
def test_other_types_are_refused_by_name(kind: str, also: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"type": "{kind}"}}')
    with pytest.raises(ValueError, match=f"type '{kind}'; those that are simulated are act, .*, smolvla{also}$"):
        config(tmp_path)


def test_autocast_follows_the_policy_where_it_says_so(toy_vlm: Path) -> None:
    autocast = training_config.autocast
    assert [autocast(policy_toys.policy_config("smolvla", toy_vlm), asked) for asked in (None, "bf16")] == [
        "no",
        "bf16",
    ]
    assert autocast(policy_toys.policy_config("smolvla", toy_vlm, use_amp=True), None) == "fp16"
    assert autocast(policy_toys.policy_config("pi0", toy_vlm, dtype="bfloat16"), "bf16") == "bf16"
    with pytest.raises(ValueError, match=r"^precision='bf16': lerobot's autocast follows the policy's dtype='float32'"):
        autocast(policy_toys.policy_config("pi0", toy_vlm), "bf16")
    with pytest.raises(ValueError, match=r"^precision='auto' tries both"):
        autocast(policy_toys.policy_config("smolvla", toy_vlm), "auto")


def shapes(policy: Any, **said: Any) -> dict[str, tuple[int, ...]]:
    training_config.set_features(policy, Job("policy", **said))
    return {name: tuple(each.shape) for name, each in {**policy.input_features, **policy.output_features}.items()}


def test_features_of_the_configuration_stay(toy_vlm: Path) -> None:
    given = {"observation.state": (2,), "observation.images.top": (3, 32, 32), "action": (2,)}
    assert shapes(policy_toys.policy_config("smolvla", toy_vlm)) == given


def test_a_spec_sets_number_and_size_of_cameras(toy_vlm: Path) -> None:
    others = {"observation.state": (2,), "action": (2,)}
    policy = policy_toys.policy_config("smolvla", toy_vlm)
    assert shapes(policy, image_size="48x64") == {"observation.images.top": (3, 48, 64), **others}
    two = {f"observation.images.camera{number}": (3, 48, 64) for number in (1, 2)}
    assert shapes(policy, images_per_sample=2) == {**two, **others}


def test_without_features_state_and_actions_are_as_wide_as_they_may_be(toy_vlm: Path) -> None:
    policy = policy_toys.policy_config("pi0", toy_vlm, **NONE)
    given = {"observation.images.camera1": (3, 48, 48), "observation.state": (4,), "action": (4,)}
    assert shapes(policy, image_size="48") == given


def test_what_only_a_dataset_says_is_asked_for(toy_vlm: Path) -> None:
    with pytest.raises(ValueError, match=r"^model='policy': its input_features name no camera, as lerobot takes them"):
        shapes(policy_toys.policy_config("smolvla", toy_vlm, **NONE), images_per_sample=2)
    with pytest.raises(ValueError, match=r"^policy type 'act': its configuration lacks observation.state, as lerobot"):
        shapes(policy_toys.policy_config("act", toy_vlm, **NONE), image_size="48")
