"""TRL's trainers by name: their batches, their models, and their first lines."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_trainers
import yaml
from late_imports import LateModule

from hf_memopt.planning import MemoryEstimate
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.job import TRAINERS, Job
from hf_memopt.planning.simulation.child_process import run_isolated

trainer_workload = LateModule("hf_memopt.planning.workloads.trainer_workload")
file_trainer = LateModule("hf_memopt.planning.workloads.file_trainer")
argument_file = LateModule("hf_memopt.planning.workloads.argument_file")
batches = LateModule("hf_memopt.planning.workloads.trainer_batches")
trl_table = LateModule("hf_memopt.planning.workloads.trl_trainers")

pytestmark = pytest.mark.filterwarnings("ignore")
GRPO: dict[str, Any] = {"num_generations": 4, "max_completion_length": 8}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = trl_trainers.decoder().config
    config.architectures, config.max_position_embeddings = ["LlamaForCausalLM"], 64
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def workload(model: Path, name: str, fields: dict[str, Any] | None = None, **said: Any) -> Any:
    more = GRPO if name == "grpo" else {}
    file = None
    if fields or more:
        file = model.with_name(f"{name}.yaml")
        file.write_text(yaml.safe_dump(more | (fields or {})))
    return trainer_workload.TrainerWorkload(Job(str(model), trainer=name, training_args=file, **said))


def made(model: Path, name: str, **said: Any) -> Any:
    run = workload(model, name, seq_len=32, batch_size=4, **said).given
    return run.make_trainer(run.options.config)


def estimated(job: Any) -> MemoryEstimate:
    step = job.as_given()
    return run_isolated(lambda: simulate_step(step))


BATCHES: dict[str, dict[str, tuple[int, ...]]] = {
    "sft": {"input_ids": (4, 32), "labels": (4, 32)},
    "dpo": {"input_ids": (8, 32), "attention_mask": (8, 32), "completion_mask": (8, 32)},
    "kto": {"input_ids": (4, 32), "KL_input_ids": (4, 32), "label": (4,)},
    "orpo": {"chosen_input_ids": (4, 32), "rejected_input_ids": (4, 32), "prompt_input_ids": (4, 16)},
    "reward": {"input_ids": (8, 32), "attention_mask": (8, 32)},
}


@pytest.mark.parametrize("name", BATCHES)
def test_samples_have_the_length_without_padding(name: str, model: Path) -> None:
    trainer = made(model, name)
    batch = batches.tensors_of(next(iter(trainer.get_train_dataloader())))
    assert {key: tuple(batch[key].shape) for key in BATCHES[name]} == BATCHES[name]
    for key, mask in batch.items():
        if key.endswith("attention_mask"):
            assert torch.equal(mask, torch.ones_like(mask))


def test_a_generation_has_prompts_and_room_for_completions(model: Path) -> None:
    trainer = made(model, "grpo")
    (batch,) = [next(iter(trainer.get_train_dataloader()))]
    assert len(batch) == 4
    assert len(trainer.processing_class(batch[0]["prompt"])["input_ids"]) == 32 - 8


@pytest.mark.parametrize(
    ("name", "fields", "rank", "num_models"),
    [
        ("sft", {}, None, 1),
        ("dpo", {}, None, 2),
        ("dpo", {}, 2, 1),
        ("kto", {}, None, 2),
        ("kto", {}, 2, 1),
        ("orpo", {}, None, 1),
        ("reward", {}, None, 1),
        ("grpo", {}, None, 1),
        ("grpo", {"beta": 0.1}, None, 2),
        ("grpo", {"beta": 0.1}, 2, 1),
    ],
)
@pytest.mark.sweep(share=0.25)
def test_a_reference_is_there_where_the_trainer_makes_one(
    name: str, fields: dict[str, Any], rank: int | None, num_models: int, model: Path
) -> None:
    found = estimated(workload(model, name, fields, seq_len=32, batch_size=4, lora_rank=rank))
    embeddings = [each for each, kind in zip(found.storage_makers, found.storage_kinds, strict=True) if "param" in kind]
    assert sum("embed_tokens.weight" in owner for owner, _ in embeddings) == num_models
    assert found.unreached == ()
    assert found.confidence != "low"


def test_a_reward_model_has_one_score_which_adapters_leave_trained(model: Path) -> None:
    trainer = made(model, "reward")
    assert trainer.model.score.weight.shape == (1, 64)
    adapted = made(model, "reward", lora_rank=2).model
    assert any("score" in name for name, weight in adapted.named_parameters() if weight.requires_grad)


def test_quantised_weights_are_prepared_as_each_trainer_does(model: Path) -> None:
    def dtypes(name: str) -> set[torch.dtype]:
        weights = made(model, name, lora_rank=2, quantize="nf4", dtype="float16").model.parameters()
        return {weight.dtype for weight in weights}

    # ORPO's alone calls PEFT's preparation.
    assert dtypes("dpo") == {torch.uint8, torch.float16, torch.bfloat16}
    assert dtypes("orpo") == {torch.uint8, torch.float32, torch.bfloat16}


FIRST_LINES = {
    "sft": "SFTTrainer of {} as bfloat16, 32 tokens in each sample; 8 per forward pass",
    "dpo": "DPOTrainer of {} as bfloat16, chosen and rejected of 32 tokens each, prompt included; 8 per forward pass",
    "kto": "KTOTrainer of {} as bfloat16, 32 tokens in each sample, prompt included; KTO's baseline is a mean over "
    "each forward pass, so its size is part of the loss; 8 per forward pass",
    "grpo": "GRPOTrainer of {} as float32 by grpo.yaml, prompts of 24 and completions of 8 tokens; times "
    "without generation and scoring",
}


@pytest.mark.parametrize("name", FIRST_LINES)
def test_the_first_line_says_the_trainer_and_its_samples(name: str, model: Path) -> None:
    assert workload(model, name, seq_len=32).name == FIRST_LINES[name].format(model)


@pytest.mark.parametrize(
    ("name", "said"),
    [("dpo", "weights that are not quantised keep their type"), ("orpo", "float32 by PEFT's preparation")],
)
def test_the_first_line_says_how_a_quantised_model_is_prepared(name: str, said: str, model: Path) -> None:
    assert said in workload(model, name, seq_len=32, lora_rank=2, quantize="nf4").name


def test_flags_without_a_file_are_fields_of_the_trainer(model: Path) -> None:
    words = {"lora_rank": 4, "quantize": "nf4", "precision": "fp16", "checkpointing": "none", "max_grad_norm": "none"}
    job = workload(model, "dpo", seq_len=16, **words)
    fields = (job.given.settings.fp16, job.given.settings.gradient_checkpointing, job.given.settings.max_grad_norm)
    assert fields == (True, False, 0.0)
    about = {"lora_r": 4, "lora_target_modules": "all-linear", "load_in_4bit": True}
    assert job.file.model_fields(job.given.changes).items() >= about.items()
    assert job.given.settings.max_length == 16


def test_the_same_answer_by_flags_and_by_file(model: Path) -> None:
    fields = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear", "load_in_4bit": True}
    fields |= {"max_length": 32}
    flags = workload(model, "dpo", seq_len=32, lora_rank=4, quantize="nf4", dtype="float32")
    assert estimated(flags).breakdown == estimated(workload(model, "dpo", fields)).breakdown


@pytest.mark.parametrize(
    ("name", "fields", "said", "message"),
    [
        ("grpo", {}, {}, "prompts may have any length; name that of prompt and completion together with seq_len"),
        ("grpo", {}, {"seq_len": 8}, "seq_len=8 has no room for a prompt before max_completion_length=8"),
        ("grpo", {}, {"seq_len": 32, "batch_size": 2}, r"generation_batch_size \(2\) must be divisible by num_gen"),
        ("dpo", {}, {"padding": True}, "padding=True with trainer='dpo' is not simulated"),
        ("dpo", {"precompute_ref_log_probs": True}, {}, "precompute_ref_log_probs=True is not simulated"),
    ],
)
def test_mistakes_are_named(name: str, fields: dict[str, Any], said: dict[str, Any], message: str, model: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _ = workload(model, name, fields, **said).name


def test_a_plan_leaves_the_generation_as_large_as_it_was(model: Path) -> None:
    job = workload(model, "grpo", {"generation_batch_size": 12}, seq_len=32, batch_size=4, accumulation=6)
    assert (job.effective_batch, job.micro_batches) == (24, [1, 2, 3, 4, 6, 12])
    job.write({"activations": "on the device"}, 2, model)
    written = yaml.safe_load((model / "grpo.yaml").read_text())
    assert (written["generation_batch_size"], written["gradient_accumulation_steps"]) == (12, 12)
    by_steps = workload(model, "grpo", {"steps_per_generation": 3}, seq_len=32, batch_size=4)
    by_steps.write({"activations": "on the device"}, 2, model)
    written = yaml.safe_load((model / "grpo.yaml").read_text())
    assert written["generation_batch_size"] == 12
    assert "steps_per_generation" not in written


def test_a_pass_of_kto_has_a_pair_to_compare_with(model: Path) -> None:
    assert workload(model, "kto", seq_len=32).micro_batches == [2, 4, 8]
    assert workload(model, "kto", {"loss_type": "apo_zero_unpaired"}, seq_len=32).micro_batches == [1, 2, 4, 8]


@pytest.mark.parametrize("name", TRAINERS[1:])
def test_the_command_names_what_the_file_lacks(name: str, model: Path) -> None:
    command = workload(model, name, seq_len=32).command([Path("a.yaml"), Path("b.yaml")])
    lacking = " --dataset_name DATASET" + (" --reward_funcs MODULE.FUNCTION" if name == "grpo" else "")
    module = trl_table.TRL[name].module
    assert command == f"accelerate launch --config_file a.yaml -m {module} --config b.yaml{lacking}"
    given = {"dataset_name": "a/b", "reward_funcs": ["accuracy_reward"]} if name == "grpo" else {"dataset_name": "a/b"}
    command = workload(model, name, given, seq_len=32).command([Path("a.yaml"), Path("b.yaml")])
    assert command.endswith("--config b.yaml")


def test_reading_fields_of_a_trainer_reads_json(model: Path) -> None:
    path = model.with_name("dpo.json")
    path.write_text(json.dumps({"beta": 0.2}))
    file = argument_file.read_argument_file(path, "dpo")
    assert file.training_arguments({}, str(model)).beta == 0.2
