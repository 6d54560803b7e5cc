from pathlib import Path
from typing import Any

import pytest
import yaml
from late_imports import LateModule
from transformers_toys import FolderOf

from hf_memopt.planning import Job

argument_file = LateModule("hf_memopt.planning.workloads.argument_file")
trainer_workload = LateModule("hf_memopt.planning.workloads.trainer_workload")

LLAMA_FACTORY: dict[str, Any] = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "all",
    "dataset": "identity",
    "template": "qwen",
    "cutoff_len": 32,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-4,
    "bf16": True,
}
AXOLOTL: dict[str, Any] = {
    "datasets": [{"path": "identity"}],
    "adapter": "lora",
    "lora_r": 4,
    "lora_target_linear": True,
    "sequence_len": 32,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": "adamw_torch_fused",
    "bf16": "auto",
    "gradient_checkpointing": True,
}


def workload(folder: Path, fields: dict[str, Any], **flags: Any) -> Any:
    (folder / "run.yaml").write_text(yaml.safe_dump(fields))
    return trainer_workload.TrainerWorkload(Job(training_args=folder / "run.yaml", **flags))


def test_a_file_of_llama_factory_is_the_run_that_it_makes(folder_of: FolderOf, tmp_path: Path) -> None:
    made = workload(tmp_path, LLAMA_FACTORY | {"model_name_or_path": folder_of("qwen3")})
    options = made.given.options
    assert (options.lora_rank, options.lora_targets, options.seq_len) == (4, "all-linear", 32)
    assert (options.dtype, options.precision, options.checkpointing) == ("bfloat16", "bf16", "reentrant")
    assert (options.optimizer, options.loss, options.trainer) == ("adamw", "full", None)
    assert (made.micro_batch, made.effective_batch) == (2, 4)
    assert made.name.endswith("; LLaMA-Factory's dataset, template not looked at")


def test_a_file_of_axolotl_is_the_run_that_it_makes(folder_of: FolderOf, tmp_path: Path) -> None:
    made = workload(tmp_path, AXOLOTL | {"base_model": folder_of("qwen3")})
    options = made.given.options
    assert (options.lora_rank, options.lora_targets, options.seq_len) == (4, "all-linear", 32)
    assert (options.dtype, options.precision, options.checkpointing) == ("bfloat16", "bf16", "full")
    assert made.name.endswith("; axolotl's datasets not looked at")


@pytest.mark.parametrize(
    ("changed", "dtype", "quantize"),
    [
        ({"finetuning_type": "full"}, "float32", "none"),
        ({"finetuning_type": "full", "bf16": False, "pure_bf16": True}, "bfloat16", "none"),
        ({"quantization_bit": 4}, "bfloat16", "nf4"),
        ({"quantization_bit": 4, "double_quantization": True}, "bfloat16", "nf4-double"),
        ({"bf16": False, "fp16": True}, "float16", "none"),
    ],
)
def test_weights_of_llama_factory(
    changed: dict[str, Any], dtype: str, quantize: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    fields = LLAMA_FACTORY | {"model_name_or_path": folder_of("qwen3")} | changed
    options = workload(tmp_path, fields).given.options
    assert (options.dtype, options.quantize) == (dtype, quantize)
    assert options.usual_adapters_dtype is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (LLAMA_FACTORY | {"stage": "ppo"}, "stage='ppo' is not sft; LLaMA-Factory's other trainings are not simulated"),
        (LLAMA_FACTORY | {"finetuning_type": "freeze"}, "finetuning_type='freeze' is neither lora nor full"),
        (AXOLOTL | {"rl": "dpo"}, "rl='dpo' is not supervised fine-tuning; axolotl's other trainings"),
        (AXOLOTL | {"gradient_checkpointing": "offload"}, "gradient_checkpointing='offload' is neither true nor false"),
        (AXOLOTL | {"adapter": "llama-adapter"}, "adapter='llama-adapter' is neither lora nor qlora"),
    ],
)
def test_other_trainings_are_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(ValueError, match=message) as caught:
        argument_file.read_argument_file(tmp_path / "run.yaml")
    assert str(caught.value).startswith(f"training_args={str(tmp_path / 'run.yaml')!r}: ")


def test_a_plan_writes_the_file_in_the_words_of_its_program(folder_of: FolderOf, tmp_path: Path) -> None:
    given = LLAMA_FACTORY | {"model_name_or_path": folder_of("qwen3")}
    made = workload(tmp_path, given)
    output = tmp_path / "plan"
    output.mkdir()
    written = made.write({"activations": "on the device", "base": "off"}, 1, output)
    changed = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    fields = yaml.safe_load(written[1].read_text())
    assert {name: fields[name] for name in given} == given | changed
    assert fields["disable_gradient_checkpointing"] is True
    assert made.command(written).endswith(f" -m llamafactory.cli train {written[1]}")
    again = argument_file.read_argument_file(written[1])
    assert again.given["gradient_checkpointing"] is False


def test_flags_that_overrule_a_file_are_written_by_its_own_names(folder_of: FolderOf, tmp_path: Path) -> None:
    fields = {"base_model": folder_of("qwen3"), **AXOLOTL}
    made = workload(tmp_path, fields, seq_len=16, lora_rank=2, effective_batch=4)
    output = tmp_path / "plan"
    output.mkdir()
    written = yaml.safe_load(made.write({"activations": "checkpointed", "base": "off"}, 1, output)[1].read_text())
    assert (written["sequence_len"], written["micro_batch_size"], written["gradient_accumulation_steps"]) == (16, 1, 4)
    assert not {"max_length", "per_device_train_batch_size"} & written.keys()
