"""Tests that offloading in SFTTrainer gives the plain run's weights, and is not stacked on TRL's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from gradients import equal
from late_imports import LateModule
from offload_trainers import STEPS, everything, weights
from tiny_decoders import SHAPE
from torch import Tensor

from hf_memopt import ActivationOffloader, SyncCopier

callbacks = LateModule("hf_memopt.callbacks")


WORDS = ["<pad>", "<eos>", "the", "robot", "moves", "left", "right", "past", "obstacle", "and", "stops", "."]

MODEL = SHAPE | {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "attention_dropout": 0.0}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    by_word = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="."))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def texts() -> Any:
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 16, (32,), generator=generator).tolist()
    rows = [torch.randint(2, len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"text": [" ".join(WORDS[word] for word in row) for row in rows]})


@pytest.fixture
def make(tmp_path: Path, tokenizer: Any, texts: Any) -> Callable[..., Any]:
    from peft import LoraConfig
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    def make(peft_config: dict[str, Any] | None = None, **options: Any) -> Any:
        torch.manual_seed(0)
        settings = STEPS | {"bf16": False, "gradient_checkpointing": False, "output_dir": str(tmp_path / "out")}
        return SFTTrainer(
            model=Qwen3ForCausalLM(Qwen3Config(**MODEL)),
            args=SFTConfig(**(settings | options)),
            train_dataset=texts,
            eval_dataset=texts.select(range(4)),
            processing_class=tokenizer,
            peft_config=None if peft_config is None else LoraConfig(**peft_config),
        )

    return make


def trained(trainer: Any) -> list[Tensor]:
    trainer.train()
    return weights(trainer)


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16_checkpointing": {"bf16": True, "gradient_checkpointing": True},
    "lora": {"peft_config": {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "down_proj"]}},
}


@pytest.mark.e2e
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.sweep(share=0.5)
def test_weights_are_bitwise_those_of_the_plain_run(make: Any, settings: str) -> None:
    want = trained(make(**SETTINGS[settings]))
    for copier in (SyncCopier(), AdversarialCopier("late")):
        offloader = everything(copier)
        trainer = make(**SETTINGS[settings])
        callbacks.attach(trainer, offloader=offloader)
        assert equal(trained(trainer), want)
        assert offloader.stats.bytes_moved > 0
        assert offloader.stats.host_bytes_live == 0
    trainer = make(**SETTINGS[settings])
    callback = callbacks.ActivationOffloadCallback(everything())
    trainer.add_callback(callback)
    assert equal(trained(trainer), want)
    assert callback.offloader.stats.bytes_moved > 0


def test_the_adapters_of_a_frozen_model_learn_and_its_weights_never_move(make: Any) -> None:
    trainer = make(**SETTINGS["lora"])
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    offloader = everything()
    storages = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    moved = record_moved(offloader)
    callbacks.attach(trainer, offloader=offloader)
    after = trained(trainer)
    assert moved
    assert not moved & storages
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert changed == [parameter.requires_grad for parameter in trainer.model.parameters()]


def record_moved(offloader: ActivationOffloader) -> set[int]:
    """Return a set that collects the addresses of all storages copied to the host."""
    moved: set[int] = set()
    copier = offloader._given_copier
    to_host = copier.to_host

    def recording(source: Tensor, destination: Tensor) -> Any:
        moved.add(source.untyped_storage().data_ptr())
        return to_host(source, destination)

    copier.to_host = recording
    return moved


def test_trls_own_offloading_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.sft_trainer.get_act_offloading_ctx_manager", lambda model: None)  # needs a GPU
    trainer = make(activation_offloading=True)
    with pytest.raises(ValueError, match=r"activation_offloading=True.*switch it off"):
        callbacks.attach(trainer, offloader=everything())
    callback = callbacks.ActivationOffloadCallback(everything())
    with pytest.raises(ValueError, match=r"activation_offloading=True.*switch it off"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
