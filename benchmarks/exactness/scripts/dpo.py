"""TRL's DPOTrainer and a tiny Llama with its copy as reference: `dpo.py [--dropout P]`."""

import argparse

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from benchmarks.exactness.tiny import TRL_SETTINGS, llama, texts, tokenizer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dropout", type=float, default=0.0)
    options = parser.parse_args()
    arguments = DPOConfig(per_device_train_batch_size=4, **TRL_SETTINGS)
    rows = [text.split() for text in texts()]
    thirds = [len(row) // 3 for row in rows]
    columns = {
        "prompt": [" ".join(row[:third]) for row, third in zip(rows, thirds, strict=True)],
        "chosen": [" " + " ".join(row[third : 2 * third]) for row, third in zip(rows, thirds, strict=True)],
        "rejected": [" " + " ".join(row[2 * third :]) for row, third in zip(rows, thirds, strict=True)],
    }
    DPOTrainer(
        llama(options.dropout),
        ref_model=llama(),
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(),
    ).train()
