from pathlib import Path
from typing import Any

import pytest
import torch
import trl_trainers
from late_imports import LateModule

from hf_memopt.planning import Job
from hf_memopt.planning.simulation.quantised.quantised_base import Nf4Linear

trainer_workload = LateModule("hf_memopt.planning.workloads.trainer_workload")
file_trainer = LateModule("hf_memopt.planning.workloads.file_trainer")

pytestmark = pytest.mark.filterwarnings("ignore")


def make(folder: Path, text: str, **flags: Any) -> Any:
    (folder / "args.yaml").write_text(text)
    config = trl_trainers.decoder().config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "model")
    flags = {"seq_len": 32, **flags}
    run = trainer_workload.TrainerWorkload(Job(str(folder / "model"), folder / "args.yaml", **flags)).given
    return run.make_trainer(run.options.config)


def test_a_plain_trainer_has_a_model_without_memory(tmp_path: Path) -> None:
    trainer = make(tmp_path, "per_device_train_batch_size: 3\n", accumulation=2, dtype="bfloat16")
    assert isinstance(trainer, file_trainer.OwnLoss)
    assert {(weight.device.type, weight.dtype) for weight in trainer.model.parameters()} == {("meta", torch.bfloat16)}


def test_qlora_by_trl_has_adapters_in_bfloat16_and_keeps_the_other_weights(tmp_path: Path) -> None:
    text = "max_length: 16\nload_in_4bit: true\nuse_peft: true\nlora_r: 4\nlora_target_modules: [q_proj]\n"
    trainer = make(tmp_path, text + "attn_implementation: flash_attention_2\ndtype: float16\n", seq_len=16)
    weights = dict(trainer.model.named_parameters())
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    assert len(trained) == 2 * 2
    assert {weight.dtype for weight in trained.values()} == {torch.bfloat16}
    frozen = {weight.dtype for name, weight in weights.items() if name not in trained}
    assert frozen == {torch.uint8, torch.float16}
    assert sum(isinstance(module, Nf4Linear) for module in trainer.model.modules()) == 2 * 7
    assert trainer.model.config._attn_implementation == "sdpa"
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape == (8, 16)


def test_a_plain_trainer_takes_adapters_too(tmp_path: Path) -> None:
    trainer = make(tmp_path, "bf16: true\n", lora_rank=2)
    assert type(trainer.model).__name__ == "PeftModel"
