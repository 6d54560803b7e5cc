"""Rewards with TRL's GRPOTrainer, which has no activation offloading of its own: `attach` is how to get it there.

python recipes/by_feature/trainers/grpo.py    # needs the extra trl
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from hf_memopt import ActivationOffloader, SyncCopier, attach  # hf_memopt

WORDS = ["<pad>", "<eos>", "say", "left", "right", "up", "down"]
on_cpu = not torch.accelerator.is_available()


def share_of_left(completions: list[str], **others: Any) -> list[float]:
    words = [completion.split() for completion in completions]
    return [each.count("left") / max(1, len(each)) for each in words]


def make_tokenizer() -> PreTrainedTokenizerFast:
    by_word = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=by_word, **settings)


def make_trainer(folder: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, bos_token_id=1, eos_token_id=1, **sizes)
    )
    settings = GRPOConfig(
        folder,
        max_steps=20,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=8,
        learning_rate=3e-3,
        logging_steps=10,
        bf16=not on_cpu,
        use_cpu=on_cpu,
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = Dataset.from_list([{"prompt": "say left"}, {"prompt": "say right"}] * 64)
    return GRPOTrainer(model, share_of_left, args=settings, train_dataset=prompts, processing_class=make_tokenizer())


with tempfile.TemporaryDirectory() as folder:
    plain, trainer = make_trainer(folder), make_trainer(folder)
    # attach(trainer) is all that a GPU needs. A CPU moves nothing by itself; a SyncCopier shows a GPU's copies.
    offloader = ActivationOffloader(
        offload_threshold_mb=0.0, mode="all" if on_cpu else "auto", copier=SyncCopier() if on_cpu else None
    )
    attach(trainer, offloader=offloader)  # hf_memopt: the loss alone; generation is left as it is
    for each in (plain, trainer):
        torch.manual_seed(1)  # the completions are drawn
        each.train()
rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
print(f"Mean reward {rewards[0]:.2f}, later {rewards[-1]:.2f}")
print(f"{offloader.stats.bytes_moved / 2**20:.1f} MiB went to host memory and came back")  # hf_memopt
equal = all(map(torch.equal, plain.model.parameters(), trainer.model.parameters()))
print(f"Weights equal to those without offloading: {equal}")
