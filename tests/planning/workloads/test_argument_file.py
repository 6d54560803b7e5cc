"""Files of TrainingArguments and of TRL's SFTConfig: the fields read, and the refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

argument_file = LateModule("hf_memopt.planning.workloads.argument_file")
transformers = LateModule("transformers")
trl = LateModule("trl")

pytestmark = pytest.mark.filterwarnings("ignore")


def read(folder: Path, text: str, name: str = "args.yaml") -> Any:
    (folder / name).write_text(text)
    return argument_file.read_argument_file(folder / name)


def test_a_file_for_trl_has_trls_defaults_and_a_plain_one_those_of_transformers(tmp_path: Path) -> None:
    plain = read(tmp_path, "learning_rate: 2e-4\nreport_to: wandb\neval_strategy: steps\n")
    sft = read(tmp_path, "max_length: 64\nmodel_name_or_path: a/model\ndataset_name: b\nenv: {A: '1'}\nfp16: true\n")
    assert (plain.trainer_name, sft.trainer_name) == ("Trainer", "SFTTrainer")
    arguments = plain.training_arguments({}, str(tmp_path))
    assert (arguments.learning_rate, arguments.bf16, arguments.gradient_checkpointing) == (2e-4, False, False)
    assert (arguments.report_to, arguments.use_cpu) == ([], True)
    arguments = sft.training_arguments({"per_device_train_batch_size": 3}, str(tmp_path))
    assert (arguments.fp16, arguments.bf16, arguments.gradient_checkpointing) == (True, False, True)
    assert (arguments.per_device_train_batch_size, arguments.max_length) == (3, 64)


def test_json_is_read_too(tmp_path: Path) -> None:
    assert read(tmp_path, json.dumps({"bf16": True}), "args.json").given == {"bf16": True}


def test_fields_of_the_model_have_the_defaults_of_trls_model_config(tmp_path: Path) -> None:
    assert {field.name: field.default for field in dataclasses.fields(trl.ModelConfig)} == argument_file.MODEL_FIELDS
    found = read(tmp_path, "use_peft: true\nlora_r: 8\n").model_fields({"lora_r": 4})
    assert (found["use_peft"], found["lora_r"], found["lora_alpha"]) == (True, 4, 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deepspeed: zero3.json", "deepspeed='zero3.json' is not simulated"),
        ("fsdp: full_shard", "fsdp='full_shard' is not simulated"),
        ("use_liger_kernel: true", "use_liger_kernel=True is not simulated"),
        ("max_length: 8\nactivation_offloading: true", "activation_offloading=True is not simulated"),
        ("optim: lion_8bit", "optim='lion_8bit' is not simulated; choose from adamw_torch_fused"),
        ("optim: adam", "adam is not a valid OptimizerNames"),
        ("gradient_accumulation_steps: many", "invalid int value: 'many'"),
        ("per_device_batch: 3", "'per_device_batch' is no field of.*any trainer of TRL; the nearest is per_device_"),
        ("beta: 0.1", "beta may be for several trainers; say trainer=dpo, kto, orpo or grpo"),
        ("discopop_tau: 0.1\nnum_generations: 2", "no trainer of TRL has all of discopop_tau, num_generations"),
        ("discopop_tau: 0.1\nprecompute_ref_log_probs: true", "precompute_ref_log_probs=True is not simulated"),
        ("num_generations: 2\nuse_vllm: true", "vllm_mode='colocate' is not simulated.*use vllm_mode: server"),
        ("use_transformers_paged: true", "use_transformers_paged=True is not simulated"),
        ("use_transformers_continuous_batching: true", "use_transformers_continuous_batching=True is not simulated"),
        ("num_generations: 2\ncache_implementation: static", "cache_implementation='static' is not simulated"),
        ("reward_model_name_or_path: a/model", "reward_model_name_or_path='a/model' is not simulated"),
        ("bf16: [", "cannot be read"),
        ("- bf16", "holds no fields"),
    ],
)
def test_what_cannot_be_simulated_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text).training_arguments({}, str(tmp_path))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("discopop_tau: 0.1\n", "DPOTrainer"),
        ("undesirable_weight: 0.5\nmodel_name_or_path: a\n", "KTOTrainer"),
        ("center_rewards_coefficient: 0.1\n", "RewardTrainer"),
        ("num_generations: 2\nreward_funcs: [accuracy_reward]\n", "GRPOTrainer"),
        ("padding_value: 0\n", "ORPOTrainer"),
    ],
)
def test_fields_of_one_trainer_tell_which_it_is(text: str, name: str, tmp_path: Path) -> None:
    assert read(tmp_path, text).trainer_name == name


def test_a_named_trainer_has_the_nearest_of_its_own_names(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("num_generation: 4\n")
    with pytest.raises(ValueError, match=r"'num_generation' is no field.*GRPOTrainer.*nearest is num_generations"):
        argument_file.read_argument_file(tmp_path / "args.yaml", "grpo")
    (tmp_path / "args.yaml").write_text("beta: 0.1\n")
    assert argument_file.read_argument_file(tmp_path / "args.yaml", "kto").trainer_name == "KTOTrainer"


def test_vllm_on_a_server_may_be(tmp_path: Path) -> None:
    file = read(tmp_path, "num_generations: 2\nuse_vllm: true\nvllm_mode: server\n")
    assert file.training_arguments({}, str(tmp_path)).use_vllm


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training_args='.*args\.yaml' is not a file"):
        argument_file.read_argument_file(tmp_path / "args.yaml")


PLACE = "hf_memopt.planning.workloads.argument_file.TrainingArguments"


@dataclasses.dataclass
class Older:
    gradient_checkpointing: bool = False
    learning_rate: float = 1.0


@dataclasses.dataclass
class Both(Older):
    activation_checkpointing: bool = False


def test_an_older_version_is_given_the_older_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLACE, Older)
    assert argument_file.current_names({"gradient_checkpointing": True, "other": 1}) == {
        "gradient_checkpointing": True,
        "other": 1,
    }
    arguments = Older()
    argument_file.set_fields(arguments, {"gradient_checkpointing": True, "learning_rate": 2.0})
    assert vars(arguments) == {"gradient_checkpointing": True, "learning_rate": 2.0}


def test_a_version_with_both_is_given_the_newer_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLACE, Both)
    assert list(argument_file.current_names({"gradient_checkpointing": True, "other": 1})) == [
        "activation_checkpointing",
        "other",
    ]
    both = {"activation_checkpointing": False, "gradient_checkpointing": True}
    for given in (both, dict(reversed(both.items()))):
        assert argument_file.current_names(given) == {"activation_checkpointing": False}
    arguments = Both()
    argument_file.set_fields(arguments, {"gradient_checkpointing": True, "learning_rate": 2.0})
    assert arguments == Both(True, 2.0, True)


def test_trainers_arguments_say_what_was_set(tmp_path_factory: pytest.TempPathFactory) -> None:
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path_factory.mktemp("out")), use_cpu=True)
    argument_file.set_fields(arguments, {"gradient_checkpointing": True})
    assert arguments.gradient_checkpointing
    assert getattr(arguments, "activation_checkpointing", True)
