"""Trains an embedding model with in-batch negatives, as `hf-memopt plan --task contrastive` says.

`hf-memopt launch -- -m hf_memopt.integrations.sentence_transformers.train --model BAAI/bge-m3 --dataset DATASET`, with
the fields below and those of SentenceTransformerTrainingArguments. The dataset's columns are a query, the passage that
answers it, and any number of passages that do not.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

from hf_memopt.command_line import flag, one_line_errors

ALL_LINEAR = "all-linear"


@dataclass
class EmbeddingArguments:
    model: str = field(metadata={"help": "hub id or folder"})
    dataset: str | None = flag(None, "hub id, folder or file; without one, texts that are made up")
    passages: int = flag(1, "of made-up texts, for each query")
    max_length: int | None = flag(None, "tokens of a text; longer ones are cut")
    dtype: str = flag("float32", "of the weights")
    attention: str = flag("auto", "auto: transformers' choice")
    micro_batch_size: int | None = flag(None, "texts of a column that run at a time, with CachedLoss (default: all)")
    lora_rank: int | None = flag(None, "train adapters of this rank")
    lora_targets: str = flag(ALL_LINEAR, "layers that get adapters, with commas between")


def main(about: EmbeddingArguments, arguments: Any) -> Any:
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from hf_memopt.integrations.sentence_transformers.cached_loss import CachedLoss
    from hf_memopt.planning.models.hub_code import check_model

    check_model(about.model)
    asked = {} if about.attention == "auto" else {"attn_implementation": about.attention}
    model = SentenceTransformer(about.model, model_kwargs={"dtype": about.dtype, **asked})
    if about.max_length is not None:
        model.max_seq_length = about.max_length
    if about.lora_rank is not None:
        from peft import LoraConfig

        targets = about.lora_targets if about.lora_targets == ALL_LINEAR else about.lora_targets.split(",")
        model.add_adapter(LoraConfig(task_type="FEATURE_EXTRACTION", r=about.lora_rank, target_modules=targets))
    loss: Any = MultipleNegativesRankingLoss(model)
    if about.micro_batch_size is not None:
        loss = CachedLoss(loss, about.micro_batch_size)
    trainer = SentenceTransformerTrainer(model, arguments, _rows(about, arguments), loss=loss)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model(arguments.output_dir)
    return trainer


def _rows(about: EmbeddingArguments, arguments: Any) -> Any:
    from datasets import Dataset

    from hf_memopt.datasets_by_name import dataset_by_name

    if about.dataset is None:
        columns = ("query", "answer", *(f"negative{number}" for number in range(about.passages - 1)))
        length, number = about.max_length or 128, 4 * arguments.per_device_train_batch_size
        return Dataset.from_dict({name: [f"{name} {row} " * length for row in range(number)] for name in columns})
    return dataset_by_name(about.dataset, "train")


if __name__ == "__main__":
    from sentence_transformers import SentenceTransformerTrainingArguments
    from transformers import HfArgumentParser

    parser = HfArgumentParser((EmbeddingArguments, SentenceTransformerTrainingArguments))
    sys.exit(one_line_errors("train", lambda given: main(*parser.parse_args_into_dataclasses(given))))
