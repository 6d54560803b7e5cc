"""sentence-transformers: any loss of its trainer with the activations of 8 sentences at a time, and the same weights.

python recipes/by_feature/trainers/sentence_embeddings.py    # needs the extra sentence-transformers
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from hf_memopt.integrations.sentence_transformers import CachedLoss  # hf_memopt

WORDS = ["<pad>", "<unk>", *(f"w{number}" for number in range(50))]
on_cpu = not torch.accelerator.is_available()


def make_model(folder: Path) -> SentenceTransformer:
    by_word = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # masks are drawn per forward pass
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(WORDS), **sizes, **no_dropout)).save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32)])


def make_pairs() -> Dataset:
    """Return sentences that are as alike as they have words in common."""
    firsts = [" ".join(f"w{(7 * i + j) % 50}" for j in range(4 + i % 8)) for i in range(256)]
    seconds = [" ".join(first.split()[: 1 + i % 4]) + " w0 w1" for i, first in enumerate(firsts)]
    scores = [(1 + i % 4) / (4 + i % 8) for i in range(256)]
    return Dataset.from_dict({"first": firsts, "second": seconds, "score": scores})


def train(folder: Path, micro_batch_size: int | None) -> Any:
    model = make_model(folder / "model")
    loss = CoSENTLoss(model)  # compares all pairs of the batch with each other
    if micro_batch_size is not None:
        loss = CachedLoss(loss, micro_batch_size)  # hf_memopt
    settings = SentenceTransformerTrainingArguments(
        str(folder),
        num_train_epochs=4,
        per_device_train_batch_size=64,
        learning_rate=1e-2,
        optim="sgd",
        logging_steps=8,
        use_cpu=on_cpu,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = SentenceTransformerTrainer(model=model, args=settings, train_dataset=make_pairs(), loss=loss)
    trainer.train()
    return trainer


with tempfile.TemporaryDirectory() as folder:
    plain, cached = train(Path(folder), None), train(Path(folder), 8)
losses = [entry["loss"] for entry in cached.state.log_history if "loss" in entry]
print(f"Loss {losses[0]:.3f}, later {losses[-1]:.3f}")
pairs = zip(plain.model.parameters(), cached.model.parameters(), strict=True)
print(f"Largest difference of a weight: {max((one - other).abs().max().item() for one, other in pairs):.0e}")
