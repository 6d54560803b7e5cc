"""Preferences with TRL's DPOTrainer: its reference model, and tensors that the policy saves, wait on the host.

python recipes/by_feature/trainers/dpo.py    # needs the extra trl
"""

import copy
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from hf_memopt import ActivationOffloader, SyncCopier, attach  # hf_memopt

WORDS = ["<pad>", "<eos>", "one", "two", "three", "four", "five", "then", "comes"]
COUNT = WORDS[2:7]
on_cpu = not torch.accelerator.is_available()


def make_tokenizer() -> PreTrainedTokenizerFast:
    by_word = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="<pad>", eos_token="<eos>")


def make_trainer(folder: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, bos_token_id=1, eos_token_id=1, **sizes)
    )
    pairs = [(COUNT[i], COUNT[i + 1], COUNT[i - 1]) for i in range(4)] * 16
    rows = [{"prompt": f"then comes {a}", "chosen": f" {right}", "rejected": f" {wrong}"} for a, right, wrong in pairs]
    settings = DPOConfig(
        folder,
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=10,
        bf16=not on_cpu,
        use_cpu=on_cpu,
        save_strategy="no",
        disable_tqdm=True,
    )
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": make_tokenizer()}
    return DPOTrainer(model, ref_model=copy.deepcopy(model), args=settings, **data)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, trainer = make_trainer(folder), make_trainer(folder)
        plain.train()
        # A GPU needs no more than attach(trainer, frozen="auto"). A CPU moves nothing by itself; this shows it.
        offloader = ActivationOffloader(
            offload_threshold_mb=0.0, mode="all" if on_cpu else "auto", copier=SyncCopier() if on_cpu else None
        )
        attach(trainer, offloader=offloader, frozen="swap" if on_cpu else "auto")  # hf_memopt: before train()
        trainer.train()
    print(f"{offloader.stats.bytes_moved / 2**20:.1f} MiB went to host memory and came back")  # hf_memopt
    equal = all(map(torch.equal, plain.model.parameters(), trainer.model.parameters()))
    print(f"Weights equal to those without offloading: {equal}")


if __name__ == "__main__":
    main()
