"""A run has one answer: by flags, by a file of arguments, and from the trainer that a script has made, to the byte."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from late_imports import LateModule
from transformers_toys import FolderOf

from hf_memopt.planning import Job, MemoryEstimate
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulation.child_process import run_isolated

datasets = LateModule("datasets")
file_trainer = LateModule("hf_memopt.planning.workloads.file_trainer")
of_job = LateModule("hf_memopt.planning.workloads.of_job")
torch = LateModule("torch")
trainer_estimate = LateModule("hf_memopt.planning.workloads.trainer_estimate")
transformers = LateModule("transformers")
trl = LateModule("trl")

Fields = dict[str, Any]
LORA: Fields = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}
REENTRANT: Fields = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
IN_BF16: Fields = {"dtype": "bfloat16"}

# Fields of TRL's settings, and the flags that say the same.
RUNS: list[tuple[Fields, Fields]] = [
    ({}, {}),
    ({"bf16": False}, {"precision": "no"}),
    ({"bf16": False, "fp16": True}, {"precision": "fp16"}),
    ({"gradient_checkpointing": False}, {"checkpointing": "none"}),
    (REENTRANT, {"checkpointing": "reentrant"}),
    ({"gradient_accumulation_steps": 3}, {"accumulation": 3}),
    ({"per_device_train_batch_size": 1}, {"batch_size": 1}),
    ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}, {"batch_size": 3, "accumulation": 2}),
    ({"max_grad_norm": 0.0}, {"max_grad_norm": "none"}),
    ({"max_grad_norm": 0.5}, {"max_grad_norm": 0.5}),
    ({"optim": "adamw_torch"}, {"optimizer": "adamw-foreach"}),
    ({"optim": "adafactor"}, {"optimizer": "adafactor"}),
    ({"optim": "sgd", "per_device_train_batch_size": 2}, {"optimizer": "sgd", "batch_size": 2}),
    ({"max_length": 33}, {"seq_len": 33}),
    ({"max_length": 96, "per_device_train_batch_size": 2}, {"seq_len": 96, "batch_size": 2}),
    ({"attn_implementation": "eager"}, {"attention": "eager"}),
    ({"attn_implementation": "sdpa"}, {"attention": "sdpa"}),
    (IN_BF16, {"dtype": "bfloat16"}),
    (IN_BF16 | {"bf16": False}, {"dtype": "bfloat16", "precision": "no"}),
    (IN_BF16 | {"optim": "adamw_torch"}, {"dtype": "bf16", "optimizer": "adamw_torch"}),
    (LORA, {"lora_rank": 8}),
    (LORA | {"gradient_checkpointing": False}, {"lora_rank": 8, "checkpointing": "none"}),
    (LORA | {"gradient_accumulation_steps": 4}, {"lora_rank": 8, "accumulation": 4}),
    (LORA | {"use_rslora": True}, {"lora_rank": 8, "use_rslora": True}),
    (LORA | {"use_dora": True}, {"lora_rank": 8, "use_dora": True}),
    (LORA | {"lora_target_modules": ["q_proj", "v_proj"]}, {"lora_rank": 8, "lora_targets": "q_proj,v_proj"}),
    (LORA | IN_BF16, {"lora_rank": 8, "dtype": "bfloat16"}),
    (LORA | REENTRANT | {"optim": "sgd"}, {"lora_rank": 8, "checkpointing": "reentrant", "optimizer": "sgd"}),
    (LORA | {"bf16": False, "max_length": 17}, {"lora_rank": 8, "precision": "no", "seq_len": 17}),
    (LORA | {"optim": "adafactor", "lora_r": 3}, {"lora_rank": 3, "optimizer": "adafactor"}),
]

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


def by_job(job: Job) -> MemoryEstimate:
    workload = of_job.workload_of(job)
    step, _ = of_job.given_step(job, workload)
    return run_isolated(lambda: simulate_step(step))


def by_trainer(model: str, fields: Fields, folder: Path) -> MemoryEstimate:
    """Estimate the trainer that a script makes of these fields, as TRL's own script does."""
    parser = transformers.HfArgumentParser((trl.ModelConfig, trl.SFTConfig))
    about, settings = parser.parse_dict({"use_cpu": True, "report_to": [], "output_dir": str(folder), **fields})
    config = transformers.AutoConfig.from_pretrained(model)
    made = transformers.AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, about.dtype or "float32"), attn_implementation=about.attn_implementation
    )
    rows = datasets.Dataset.from_dict({"input_ids": [[0] * settings.max_length] * 64})
    trainer = trl.SFTTrainer(
        made,
        args=settings,
        train_dataset=rows,
        peft_config=trl.get_peft_config(about),
        processing_class=file_trainer._tokenizer(),
    )
    found: MemoryEstimate = trainer_estimate.estimate_trainer(trainer)
    return found


@pytest.mark.sweep(share=0.1)
@pytest.mark.parametrize(("fields", "flags"), RUNS, ids=[str(number) for number in range(len(RUNS))])
def test_flags_a_file_and_a_trainer_have_the_same_bytes(
    fields: Fields, flags: Fields, folder_of: FolderOf, tmp_path: Path
) -> None:
    model = folder_of("qwen3")
    length = {"max_length": 48}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model_name_or_path": model, **length, **fields}))
    by_file = by_job(Job(training_args=tmp_path / "run.yaml", trainer="sft"))
    by_flags = by_job(Job(model, **({"seq_len": 48, "dtype": "float32"} | flags)))
    by_names = by_job(Job(model, trainer="sft", **({"dtype": "float32"} | length | names_of(fields))))
    made = by_trainer(model, length | fields, tmp_path / "output")
    for other in (by_flags, by_names, made):
        assert other.peak_bytes == by_file.peak_bytes
        assert other.reserved_bytes == by_file.reserved_bytes
        assert other.phase == by_file.phase


def names_of(fields: Fields) -> Fields:
    """Return the fields that a job takes by their own names; settings of settings are flags alone."""
    given = {name: value for name, value in fields.items() if name != "gradient_checkpointing_kwargs"}
    if "gradient_checkpointing_kwargs" in fields:
        given |= {"gradient_checkpointing": None, "checkpointing": "reentrant"}
    if isinstance(given.get("lora_target_modules"), list):
        given["lora_target_modules"] = ",".join(given["lora_target_modules"])
    if given.get("max_grad_norm") == 0.0:
        given["max_grad_norm"] = "none"
    return given
