"""TRL's trainers of a tiny model, whose batches have one length, and Trainer itself."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from late_imports import LateModule

transformers = LateModule("transformers")
trl = LateModule("trl")
orpo_trainer = LateModule("trl.experimental.orpo")
datasets = LateModule("datasets")
peft = LateModule("peft")

WORDS = ["<pad>", "<eos>", "one", "two", "three", "then"]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    by_word = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="<pad>", eos_token="<eos>")


def decoder() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.LlamaConfig(vocab_size=len(WORDS), **special, **sizes)
    return transformers.LlamaForCausalLM(config)


def sft(folder: Path, lora: bool = False, **options: Any) -> Any:
    rows = [{"text": "one two three " * 8}] * 16
    arguments = trl.SFTConfig(str(folder), **(SETTINGS | options))
    data = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer()}
    return trl.SFTTrainer(decoder(), args=arguments, peft_config=adapters() if lora else None, **data)


def adapters(**options: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules="all-linear", **options)


def dpo(folder: Path, **options: Any) -> Any:
    rows = [{"prompt": "then one", "chosen": " two" * 7, "rejected": " three" * 7}] * 16
    model, arguments = decoder(), trl.DPOConfig(str(folder), **(SETTINGS | options))
    data = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer()}
    return trl.DPOTrainer(model, ref_model=copy.deepcopy(model), args=arguments, **data)


def kto(folder: Path, **options: Any) -> Any:
    rows = [{"prompt": "then one", "completion": " two" * 7, "label": bool(number % 2)} for number in range(16)]
    model, arguments = decoder(), trl.KTOConfig(str(folder), **(SETTINGS | options))
    data = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer()}
    return trl.KTOTrainer(model, ref_model=copy.deepcopy(model), args=arguments, **data)


def orpo(folder: Path, lora: bool = False, **options: Any) -> Any:
    rows = [{"prompt": "then one", "chosen": " two" * 7, "rejected": " three" * 7}] * 16
    arguments = orpo_trainer.ORPOConfig(str(folder), **(SETTINGS | options))
    data = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer()}
    return orpo_trainer.ORPOTrainer(decoder(), args=arguments, peft_config=adapters() if lora else None, **data)


def reward(folder: Path, lora: bool = False, **options: Any) -> Any:
    rows = [{"prompt": "then one", "chosen": " two" * 7, "rejected": " three" * 7}] * 16
    torch.manual_seed(0)
    config = decoder().config
    config.num_labels = 1
    arguments = trl.RewardConfig(str(folder), **(SETTINGS | options))
    data = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer()}
    model = transformers.LlamaForSequenceClassification(config)
    head = adapters(task_type="SEQ_CLS", modules_to_save=["score"]) if lora else None
    return trl.RewardTrainer(model, args=arguments, peft_config=head, **data)


def grpo(folder: Path, **options: Any) -> Any:
    """Return a trainer whose completions never end before `max_completion_length`."""
    endless = {"generation_kwargs": {"suppress_tokens": [1]}, "num_generations": 2, "max_completion_length": 4}
    arguments = trl.GRPOConfig(str(folder), **(SETTINGS | endless | options))
    data = {"train_dataset": datasets.Dataset.from_list([{"prompt": "then one"}] * 8), "processing_class": tokenizer()}
    return trl.GRPOTrainer(decoder(), reward_funcs=no_reward, args=arguments, **data)


def rloo(folder: Path) -> Any:
    arguments = trl.RLOOConfig(str(folder), **SETTINGS, beta=0.0, num_generations=2, max_completion_length=4)
    data = {"train_dataset": datasets.Dataset.from_list([{"prompt": "then one"}] * 8), "processing_class": tokenizer()}
    return trl.RLOOTrainer(decoder(), reward_funcs=no_reward, args=arguments, **data)


def no_reward(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def seq2seq(folder: Path, **options: Any) -> Any:
    return plain(folder, kind="Seq2SeqTrain", **options)


def plain(
    folder: Path,
    lengths: Callable[[int], int] = lambda number: 64,
    *,
    lora: bool = False,
    kind: str = "Train",
    **options: Any,
) -> Any:
    """Return a Trainer with 16 samples, the n-th as long as `lengths(n)`; batches are padded."""
    of_trainer = {name: options.pop(name) for name in ("model", "optimizers") if name in options}
    rows = [torch.zeros(lengths(number), dtype=torch.long) for number in range(16)]

    def collate(samples: list[Any]) -> dict[str, Any]:
        tokens = torch.nn.utils.rnn.pad_sequence([each["input_ids"] for each in samples], batch_first=True)
        return {"input_ids": tokens, "labels": tokens.clone()}

    arguments = getattr(transformers, f"{kind}ingArguments")(str(folder), **(SETTINGS | options))
    data = {"train_dataset": [{"input_ids": row} for row in rows], "data_collator": collate}
    model = peft.get_peft_model(decoder(), adapters()) if lora else decoder()
    return getattr(transformers, f"{kind}er")(**({"model": model} | of_trainer), args=arguments, **data)
