"""transformers' Trainer and a tiny Llama: `trainer.py [--dropout P] [--attention sdpa]`."""

import argparse

from transformers import Trainer, TrainingArguments

from benchmarks.exactness.tiny import collate, llama, samples

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--attention", default="sdpa")
    options = parser.parse_args()
    arguments = TrainingArguments(
        max_steps=8, per_device_train_batch_size=4, learning_rate=1e-3, use_cpu=True, disable_tqdm=True
    )
    dataset = [{"input_ids": sample} for sample in samples()]
    model = llama(options.dropout, options.attention)
    Trainer(model, arguments, train_dataset=dataset, data_collator=collate).train()
