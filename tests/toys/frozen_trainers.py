"""TRL's trainers that call frozen models beside the one that learns: references, teachers and reward models."""

import copy
from pathlib import Path
from typing import Any

import torch
from late_imports import LateModule

transformers = LateModule("transformers")
trl = LateModule("trl")
gkd_trainer = LateModule("trl.experimental.gkd")
gold_trainer = LateModule("trl.experimental.gold")
peft = LateModule("peft")
dpo_script = LateModule("hf_memopt.recipes.by_feature.trainers.dpo")

STEPS: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(seed: int, model_class: str = "LlamaForCausalLM", **options: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(dpo_script.WORDS), pad_token_id=0, bos_token_id=1, eos_token_id=1, **SIZES, **options
    )
    return getattr(transformers, model_class)(config)


def rows(*columns: str) -> Any:
    from datasets import Dataset

    count = dpo_script.COUNT
    texts = [
        {"prompt": f"then comes {count[i]}", "chosen": f" {count[i + 1]}", "rejected": f" {count[i - 1]}"}
        for i in range(4)
    ]
    return Dataset.from_list([{name: row[name] for name in columns} for row in texts * 4])


def with_frozen_layer() -> Any:
    """Return a policy with a layer that its reference, a copy, can share."""
    policy = llama(0)
    for parameter in policy.model.layers[0].parameters():
        parameter.requires_grad_(False)
    return policy


def adapters() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


def dpo(folder: Path, lora: bool = False, **options: Any) -> Any:
    arguments = trl.DPOConfig(str(folder), **(STEPS | options))
    return _with_reference(trl.DPOTrainer, arguments, rows("prompt", "chosen", "rejected"), lora)


def kto(folder: Path, lora: bool = False, **options: Any) -> Any:
    from datasets import Dataset

    count = dpo_script.COUNT
    texts = [
        {"prompt": f"then comes {count[i]}", "completion": f" {count[i + i % 2]}", "label": i % 2 == 1}
        for i in range(4)
    ]
    return _with_reference(
        trl.KTOTrainer, trl.KTOConfig(str(folder), **(STEPS | options)), Dataset.from_list(texts * 4), lora
    )


def _with_reference(trainer_class: Any, arguments: Any, data: Any, lora: bool) -> Any:
    policy = with_frozen_layer()
    models = {"peft_config": adapters()} if lora else {"ref_model": copy.deepcopy(policy)}
    options = {"args": arguments, "train_dataset": data, "processing_class": dpo_script.make_tokenizer()}
    return trainer_class(policy, **models, **options)


def grpo(folder: Path, lora: bool = False, **options: Any) -> Any:
    """Return a trainer with a reference, which TRL loads from a folder, a function and two reward models."""
    return _with_rewards(folder, trl.GRPOTrainer, trl.GRPOConfig, lora, options)


def rloo(folder: Path, lora: bool = False, **options: Any) -> Any:
    return _with_rewards(folder, trl.RLOOTrainer, trl.RLOOConfig, lora, options)


def _with_rewards(folder: Path, trainer_class: Any, config_class: Any, lora: bool, options: dict[str, Any]) -> Any:
    tokenizer = dpo_script.make_tokenizer()
    tokenizer.padding_side = "left"
    settings = {"num_generations": 4, "max_completion_length": 4, "beta": 0.1, **options}
    policy = llama(0)
    policy.config._name_or_path = str(folder / "policy")
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    judges = [llama(seed, "LlamaForSequenceClassification", num_labels=1) for seed in (1, 2)]
    return trainer_class(
        policy,
        [judges[0], length, judges[1], judges[0]],
        args=config_class(str(folder), **(STEPS | settings)),
        train_dataset=rows("prompt"),
        processing_class=tokenizer,
        reward_processing_classes=[tokenizer, None, tokenizer, tokenizer],
        peft_config=adapters() if lora else None,
    )


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def gkd(folder: Path, **options: Any) -> Any:
    settings = {"lmbda": 0.0, "max_length": 16, "max_new_tokens": 4, **options}
    return _with_teacher(gkd_trainer.GKDTrainer, gkd_trainer.GKDConfig(str(folder), **(STEPS | settings)))


def gold(folder: Path, **options: Any) -> Any:
    settings = {
        "lmbda": 0.0,
        "max_length": 16,
        "max_completion_length": 4,
        "use_uld_loss": False,
        "use_extended_uld": False,
        **options,
    }
    return _with_teacher(gold_trainer.GOLDTrainer, gold_trainer.GOLDConfig(str(folder), **(STEPS | settings)))


def _with_teacher(trainer_class: Any, arguments: Any) -> Any:
    from datasets import Dataset

    tokenizer = dpo_script.make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    said = [("user", "then comes"), ("assistant", f"{dpo_script.COUNT[1]} {dpo_script.COUNT[2]}")]
    messages = [{"role": role, "content": text} for role, text in said]
    return trainer_class(
        llama(0),
        teacher_model=llama(1),
        args=arguments,
        train_dataset=Dataset.from_list([{"messages": messages}] * 16),
        processing_class=tokenizer,
    )
