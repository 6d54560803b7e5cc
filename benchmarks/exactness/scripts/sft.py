"""TRL's SFTTrainer and a tiny Llama: `sft.py [--lora] [--dropout P] [--batch 4]`; gradient checkpointing is off."""

import argparse

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from benchmarks.exactness.tiny import TRL_SETTINGS, llama, texts, tokenizer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    arguments = SFTConfig(per_device_train_batch_size=options.batch, **TRL_SETTINGS)
    adapters = LoraConfig(r=4, target_modules="all-linear", lora_dropout=options.dropout) if options.lora else None
    SFTTrainer(
        llama(options.dropout),
        arguments,
        train_dataset=Dataset.from_dict({"text": texts()}),
        processing_class=tokenizer(),
        peft_config=adapters,
    ).train()
