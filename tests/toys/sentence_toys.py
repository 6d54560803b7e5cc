"""A small model of sentence embeddings, and sentences of several lengths."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(30))]
WIDTH = 16


def make_model(folder: Path, dropout: float) -> SentenceTransformer:
    """Return a model with the same weights at each call, and with a mean pooling."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder / "bert")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer(), pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        folder / "bert"
    )
    return SentenceTransformer(modules=[Transformer(str(folder / "bert")), Pooling(WIDTH)], device="cpu")


def static_model() -> SentenceTransformer:
    """Return a model that looks up words and takes their mean."""
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer(), embedding_dim=WIDTH)], device="cpu")


def tokenizer() -> Tokenizer:
    by_word = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return by_word


def sentence(number: int) -> str:
    """Return 2 to 9 words."""
    return " ".join(f"w{(number * 7 + place * place) % 30}" for place in range(2 + number * 5 % 8))


def rows(scored: bool) -> Dataset:
    """Return 22 pairs, with scores if asked."""
    columns: dict[str, Any] = {
        "anchor": [sentence(number) for number in range(22)],
        "positive": [sentence(number + 3) for number in range(22)],
    }
    if scored:
        columns["score"] = [number % 5 / 4 for number in range(22)]
    return Dataset.from_dict(columns)


def batch(model: SentenceTransformer, num_columns: int) -> list[dict[str, Tensor]]:
    return [model.preprocess([sentence(number + 8 * column) for number in range(8)]) for column in range(num_columns)]


def train(folder: Path, model: SentenceTransformer, loss: nn.Module, data: Dataset, **settings: Any) -> Any:
    trainer = make_trainer(folder, model, loss, data, **settings)
    trainer.train()
    return trainer


def make_trainer(folder: Path, model: SentenceTransformer, loss: nn.Module, data: Dataset, **settings: Any) -> Any:
    quiet: dict[str, Any] = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
    }
    args = SentenceTransformerTrainingArguments(str(folder / "run"), **(quiet | settings))
    return SentenceTransformerTrainer(model=model, args=args, train_dataset=data, eval_dataset=data, loss=loss)
