"""A script like transformers' examples: `rows.pt` beside it has the model's folder, the class to load it, and rows."""

from pathlib import Path

import torch
import transformers
from transformers import HfArgumentParser, Trainer, TrainingArguments

if __name__ == "__main__":
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    arguments.max_steps, arguments.report_to, arguments.save_strategy = 2, [], "no"
    folder, kind, dtype, rows = torch.load(Path(__file__).with_name("rows.pt"))
    model = getattr(transformers, kind).from_pretrained(folder, dtype=dtype)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model("trained")
