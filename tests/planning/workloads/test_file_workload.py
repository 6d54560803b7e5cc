from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trl_trainers
import yaml
from late_imports import LateModule

from hf_memopt.planning import Job
from hf_memopt.planning.estimate import _estimate, _repeated, simulate_step
from hf_memopt.planning.simulation.child_process import run_isolated

trainer_workload = LateModule("hf_memopt.planning.workloads.trainer_workload")

SFT: dict[str, Any] = {"max_length": 32, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
# Inputs of its layers, 16 MiB for a micro-batch of 8 samples, are above the least that is offloaded.
WIDE = 8192
ADAPTERS: dict[str, Any] = {"use_peft": True, "lora_r": 2, "lora_target_modules": ["q_proj"]}

pytestmark = pytest.mark.filterwarnings("ignore")


def workload(folder: Path, fields: dict[str, Any], num_layers: int = 2, width: int = 64, **options: Any) -> Any:
    config = trl_trainers.decoder().config
    config.hidden_size, config.head_dim = width, width // 4
    config.num_hidden_layers, config.max_position_embeddings = num_layers, 64
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "model")
    (folder / "run.yaml").write_text(yaml.safe_dump(fields))
    return trainer_workload.TrainerWorkload(Job(str(folder / "model"), folder / "run.yaml", **options))


@pytest.mark.e2e
def test_equal_layers_are_simulated_once_with_the_bytes_of_all(tmp_path: Path) -> None:
    made = workload(tmp_path, SFT | ADAPTERS, num_layers=5)
    few, whole = made.as_given(), made.as_given()
    expected = run_isolated(lambda: simulate_step(replace(whole, repeated=None)))
    found = run_isolated(lambda: _estimate(_repeated(few.repeated, None), None, few))
    assert found.breakdown == expected.breakdown
    assert found.reserved_bytes == expected.reserved_bytes
    assert few.num_micro_batches == 2


@pytest.mark.slow
def test_a_few_layers_tell_what_offloading_the_inputs_of_all_does(tmp_path: Path) -> None:
    made = workload(tmp_path, {"per_device_train_batch_size": 8}, num_layers=9, width=WIDE, seq_len=64)
    few, whole = (made.simulated({"activations": "checkpointed, inputs offloaded"}, 8) for _ in range(2))
    expected = run_isolated(lambda: simulate_step(replace(whole, repeated=None), gpu="rtx4090"))
    found = run_isolated(lambda: _estimate(_repeated(few.repeated, "rtx4090"), "rtx4090", few))
    assert found.trace == expected.trace
    assert found.storage_kinds == expected.storage_kinds
    assert found.host_bytes == expected.host_bytes > 2**20


@pytest.mark.e2e
@pytest.mark.slow
def test_a_plan_of_what_is_offloaded_has_settled_after_the_simulated_steps(tmp_path: Path) -> None:
    made = workload(tmp_path, {"per_device_train_batch_size": 8}, width=WIDE, seq_len=64, effective_batch=16)
    step, again = (made.simulated({"activations": "offloaded where free"}, 8) for _ in range(2))
    assert (step.num_micro_batches, step.num_steps) == (2, 3)
    found = run_isolated(lambda: simulate_step(step, gpu="rtx4090"))
    longer = run_isolated(lambda: simulate_step(replace(again, num_steps=5), gpu="rtx4090"))
    for name in ("peak_bytes", "reserved_bytes", "phases", "breakdown", "host_bytes"):
        assert getattr(found, name) == getattr(longer, name), name
    assert found.host_bytes > 2**20


def test_it_says_what_it_is(tmp_path: Path) -> None:
    made = workload(tmp_path, SFT | {"attn_implementation": "flash_attention_2"}, effective_batch=12)
    text = f"SFTTrainer of {tmp_path / 'model'} as float32 by run.yaml, 32 tokens in each sample"
    assert made.name == f"{text}; flash_attention_2 taken for sdpa"
    assert (made.micro_batch, made.effective_batch, made.micro_batches) == (2, 12, [1, 2, 3, 4, 6, 12])
    assert workload(tmp_path, SFT, seq_len=48).given.settings.max_length == 48


@pytest.mark.parametrize(
    ("activations", "starts"),
    [
        ("on the device", "accelerate launch --config_file a.yaml -m trl.scripts.sft --config b.yaml"),
        ("all offloaded", "hf-memopt launch --config_file a.yaml --offload all -- -m trl.scripts.sft --config b.yaml"),
    ],
)
def test_a_plan_starts_trls_script(activations: str, starts: str, tmp_path: Path) -> None:
    made = workload(tmp_path, SFT | {"dataset_name": "a/dataset"})
    (tmp_path / "plan").mkdir()
    written = made.write({"activations": activations}, 8, tmp_path / "plan")
    fields = yaml.safe_load(written[1].read_text())
    assert (fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]) == (8, 1)
    assert fields["model_name_or_path"] == str(tmp_path / "model")
    assert made.command([Path("a.yaml"), Path("b.yaml")]) == starts


def test_an_offloaded_candidate_is_attached_to(tmp_path: Path) -> None:
    made = workload(tmp_path, {"per_device_train_batch_size": 2}, seq_len=32)
    step = made.simulated({"activations": "offloaded where free"}, 1)
    assert (step.num_steps, step.repeated) == (3, None)
    (tmp_path / "plan").mkdir()
    _, written = made.write({"activations": "on the device"}, 2, tmp_path / "plan")
    assert "model_name_or_path" not in yaml.safe_load(written.read_text())  # no field of TrainingArguments


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"max_length": None}, {}, "max_length is none.*seq_len"),
        (SFT, {"seq_len": 65}, "seq_len=65 is longer than the model's max_position_embeddings=64"),
        ({"bf16": True}, {"seq_len": 8, "task": "image-classification"}, "for task='image-classification'"),
        ({"bf16": True}, {}, "name one with seq_len"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        workload(tmp_path, fields, **options)
