from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl_trainers
from late_imports import LateModule

from hf_memopt.estimate.simulation.quantised.quantised_linear import Nf4Linear

argument_file = LateModule("hf_memopt.integrations.transformers.argument_file")
file_trainer = LateModule("hf_memopt.integrations.transformers.file_trainer")

pytestmark = pytest.mark.filterwarnings("ignore")


def make(folder: Path, text: str, **changes: Any) -> Any:
    (folder / "args.yaml").write_text(text)
    file = argument_file.read_argument_file(folder / "args.yaml")
    return file_trainer.make_trainer(file, trl_trainers.decoder().config, "causal", changes, 32, str(folder / "out"))


def test_a_plain_trainer_has_a_model_without_memory_and_full_samples(tmp_path: Path) -> None:
    trainer = make(tmp_path, "per_device_train_batch_size: 3\n", gradient_accumulation_steps=2, dtype="bfloat16")
    assert type(trainer).__name__ == "Trainer"
    assert {(weight.device.type, weight.dtype) for weight in trainer.model.parameters()} == {("meta", torch.bfloat16)}
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 32)
    assert len(trainer.train_dataset) == 6


def test_qlora_by_trl_has_adapters_in_bfloat16_and_keeps_the_other_weights(tmp_path: Path) -> None:
    text = "max_length: 16\nload_in_4bit: true\nuse_peft: true\nlora_r: 4\nlora_target_modules: [q_proj]\n"
    trainer = make(tmp_path, text + "attn_implementation: flash_attention_2\ndtype: float16\n")
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
    trainer = make(tmp_path, "bf16: true\n", use_peft=True, lora_r=2, lora_target_modules="all-linear")
    assert type(trainer.model).__name__ == "PeftModelForCausalLM"


def test_how_frozen_weights_are_stored() -> None:
    fields = {"model_name_or_path": "model", "load_in_4bit": False, "load_in_8bit": False, "use_bnb_nested_quant": True}
    config = SimpleNamespace()
    assert file_trainer.storage(fields, config) is None
    assert file_trainer.storage(fields | {"load_in_8bit": True}, config) == "int8"
    assert file_trainer.storage(fields | {"load_in_4bit": True}, config) == "nf4-double"
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert file_trainer.storage(fields, config) == "nf4"
