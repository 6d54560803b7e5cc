"""CPU time and saved activations of a step with `GradientCache` and with sentence-transformers' own cached loss.

    python -m benchmarks.gradient_cache

A BERT embeds pairs of sentences, and each embedding is compared with all others. Every kind computes the same loss of
the same batch, cached kinds in micro-batches of the same size, and an optimizer step follows. Kinds take turns within
each round, and ratios are medians over rounds. The clock is the thread's CPU time, so that other processes disturb
little. Memory is the peak of autograd's saved tensors, each storage once, without weights.
"""

import statistics
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from benchmarks.common import CPU, MIB, BenchmarkParser, environment, finish, print_rows
from benchmarks.timing import median_and_spread
from hf_memopt import GradientCache
from hf_memopt.integrations.sentence_transformers import CachedLoss

WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(1000))]
THEIRS = "CachedMultipleNegativesRankingLoss"
TARGET = 1.0  # upper limit of our time over theirs
Step = Callable[[], float]


def make_model(sizes: dict[str, int]) -> SentenceTransformer:
    torch.manual_seed(0)
    by_word = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=4,
        intermediate_size=4 * sizes["hidden_size"],
    )
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
        return SentenceTransformer(modules=[Transformer(folder), Pooling(sizes["hidden_size"])], device="cpu").train()


def make_columns(sizes: dict[str, int]) -> list[dict[str, Tensor]]:
    """Make tokenized pairs of one length, so that no kind gains by cutting padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, len(WORDS), (2, sizes["num_pairs"], sizes["num_words"]), generator=generator)
    return [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in tokens]


def kinds(model: SentenceTransformer, columns: list[dict[str, Tensor]], micro_batch_size: int) -> dict[str, Step]:
    accelerator = Accelerator(cpu=True)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-9)  # so small that all rounds see the same model
    prepared = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-9))
    uncached = MultipleNegativesRankingLoss(model)

    def step_of(loss_fn: nn.Module) -> Step:
        def step() -> float:
            loss = loss_fn([dict(column) for column in columns], None)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            plain.step()
            plain.zero_grad()
            return loss.item()

        return step

    def embed(part: dict[str, Tensor]) -> Tensor:
        embedding: Tensor = model(dict(part))["sentence_embedding"]
        return embedding

    def of_all(embeddings: Tensor) -> Tensor:
        return uncached.compute_loss_from_embeddings(list(embeddings.chunk(2)), None)

    cache = GradientCache(accelerator, embed, of_all, models=[model])
    starts = range(0, len(columns[0]["input_ids"]), micro_batch_size)
    parts = [{key: value[at : at + micro_batch_size] for key, value in c.items()} for c in columns for at in starts]
    return {
        "the whole batch": step_of(uncached),
        THEIRS: step_of(CachedMultipleNegativesRankingLoss(model, mini_batch_size=micro_batch_size)),
        "GradientCache.step": lambda: cache.step(parts, prepared, max_grad_norm=1.0).loss,
        "CachedLoss": step_of(CachedLoss(uncached, micro_batch_size)),
    }


@dataclass
class _Saved:
    tensor: Tensor


class SavedPeak:
    """A counter of the peak bytes of saved tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
        self._num_saved: Counter[int] = Counter()  # tensors in the storage of an address
        self._num_bytes = self.peak_bytes = 0

    def of(self, step: Step) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            step()
        return self.peak_bytes

    def _pack(self, tensor: Tensor) -> _Saved:
        saved, storage = _Saved(tensor.detach()), tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._count(storage.data_ptr(), storage.nbytes(), 1)
            weakref.finalize(saved, self._count, storage.data_ptr(), storage.nbytes(), -1)
        return saved

    def _count(self, address: int, num_bytes: int, change: int) -> None:
        was_held = self._num_saved[address] > 0
        self._num_saved[address] += change
        self._num_bytes += num_bytes * ((self._num_saved[address] > 0) - was_held)
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)


def measure(sizes: dict[str, int], num_rounds: int) -> dict[str, Any]:
    model, columns = make_model(sizes), make_columns(sizes)
    compared = kinds(model, columns, sizes["micro_batch_size"])
    peaks = {name: SavedPeak(model).of(step) for name, step in compared.items()}
    rounds, losses = [], {}
    for _ in range(num_rounds):
        times = {}
        for name, step in compared.items():
            torch.manual_seed(2)
            begun = time.thread_time()
            losses[name] = step()
            times[name] = 1e3 * (time.thread_time() - begun)
        rounds.append(times)
    return {
        name: {
            "cpu_ms": median_and_spread([times[name] for times in rounds]),
            "of_theirs": statistics.median(times[name] / times[THEIRS] for times in rounds),
            "saved_peak_bytes": peaks[name],
            "loss": losses[name],
        }
        for name in compared
    }


def run(sizes: dict[str, int], num_rounds: int) -> dict[str, Any]:
    return {
        **environment(CPU),
        "versions": {**environment(CPU)["versions"], "sentence-transformers": version("sentence-transformers")},
        "benchmark": "gradient_cache",
        "sizes": sizes,
        "num_rounds": num_rounds,
        "target_of_theirs": TARGET,
        "kinds": measure(sizes, num_rounds),
    }


def print_report(results: dict[str, Any]) -> None:
    rows = [
        {
            "kind": name,
            "CPU ms / step": f"{found['cpu_ms']['median']:.0f}",
            "of theirs": f"{found['of_theirs']:.2f}",
            "peak of saved MiB": f"{found['saved_peak_bytes'] / MIB:.1f}",
            "loss": f"{found['loss']:.5f}",
        }
        for name, found in results["kinds"].items()
    ]
    print(f"{results['sizes']}, medians of {results['num_rounds']} rounds")
    print_rows(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    sizes = {"hidden_size": 256, "num_layers": 4, "num_pairs": 64, "num_words": 32, "micro_batch_size": 8}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="per kind (default: %(default)s)")
    options = vars(parser.options(arguments))
    torch.set_num_threads(1)
    results = run({name: options[name] for name in sizes}, options["rounds"])
    finish(results, print_report, options["output"], "gradient-cache")


if __name__ == "__main__":
    main()
