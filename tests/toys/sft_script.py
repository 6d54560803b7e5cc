"""A script without this library, `sft_script.py FOLDER`: TRL's SFTTrainer; `results.pt` has losses and weights."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "the", "robot", "moves", "left", "right", "past", "obstacle", "and", "stops", "."]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    by_word = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="."))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    trainer = SFTTrainer(
        Qwen3ForCausalLM(Qwen3Config(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **SHAPE)),
        SFTConfig(
            str(folder / "out"),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict(
            {"text": [" ".join(WORDS[2 + row * word % 10] for word in range(4 + row % 9)) for row in range(32)]}
        ),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="<pad>", eos_token="<eos>"),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    torch.save((losses, trainer.model.state_dict()), folder / "results.pt")
