"""Exact steps under FSDP2, a function for each situation, for test_sharded_training.py."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from accelerators import sharding_on_the_cpu
from collective_names import REDUCE_SCATTERS
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from training_rank import SPLITS, error_of, mean_loss, notes_of_running_out, samples, sliced_wasserstein
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt.training import GradientCache, MicroBatcher, find_micro_batch, train_step

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16}
LLAMA = {**SIZES, "num_attention_heads": 2, "max_position_embeddings": 16}
LENGTHS = ((9, 3, 5), (4, 8, 2))  # tokens of each rank's sentences


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 3))


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA))


class ShardedRun:
    """A sharded model, the whole gradient of each step, and a plain twin; `by_hand`: sharded before `prepare`."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = network,
        dtype: torch.dtype = torch.float64,
        *,
        by_hand: bool = False,
        each_batch: bool = False,
        precision: str = "no",
    ) -> None:
        by_class = {
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": ["Block"] if make is network else ["LlamaDecoderLayer"],
        }
        policy = {"auto_wrap_policy": "no_wrap"} if by_hand else by_class
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **policy)
        windows = GradientAccumulationPlugin(2, sync_each_batch=each_batch)
        self.accelerator = sharding_on_the_cpu(
            fsdp_plugin=plugin, gradient_accumulation_plugin=windows, mixed_precision=precision
        )
        self.rank = self.accelerator.process_index
        self.plain, model = make().to(dtype), make().to(dtype)
        if by_hand:
            mesh = init_device_mesh("cpu", (2,))
            for block in (model[0], model[1], model):
                fully_shard(block, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *event: self.note())
        self.gradient = torch.empty(0)
        self.num_exchanges = 0
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        assert isinstance(self.model, FSDPModule)
        assert self.accelerator.is_fsdp2

    def note(self) -> None:
        self.gradient = whole([parameter.grad for parameter in self.model.parameters()])

    @contextmanager
    def counting(self) -> Iterator[None]:
        def counted(exchange: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                self.num_exchanges += 1
                return exchange(*args, **kwargs)

            return run

        with ExitStack() as stack:
            for name in REDUCE_SCATTERS:
                stack.enter_context(patch.object(distributed, name, counted(getattr(distributed, name))))
            yield

    def step(self, micro_batches: Any, loss_fn: Any = mean_loss, **options: Any) -> Any:
        with self.counting():
            return train_step(self.accelerator, self.model, loss_fn, micro_batches, self.optimizer, **options)

    def difference(self, loss: Tensor) -> float:
        """Return the gradient's largest difference from that of `loss`, a loss of `plain`."""
        self.plain.zero_grad()
        loss.backward()
        return (self.gradient - self.plain_gradient()).abs().max().item()

    def plain_gradient(self) -> Tensor:
        return whole([parameter.grad for parameter in self.plain.parameters()])

    def weights(self) -> list[float]:
        return whole(list(self.model.parameters())).tolist()


def whole(tensors: list[Any]) -> Tensor:
    parts = [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]
    return torch.cat([part.detach().flatten() for part in parts]).clone()


def splits(**options: bool) -> dict[str, Any]:
    results = {}
    for name, sizes in SPLITS.items():
        run = ShardedRun(**options)
        parts = [samples(sum(of_rank), rank) for rank, of_rank in enumerate(sizes)]
        result = run.step(parts[run.rank].split(sizes[run.rank]))
        loss = mean_loss(run.plain, torch.cat(parts))
        results[name] = [
            run.difference(loss),
            abs(result.loss - loss.item()),
            abs(result.grad_norm - run.plain_gradient().norm().item()),
            run.num_exchanges,
            result.num_micro_batches,
        ]
    return results


def one_batch_each() -> bool:
    """Return whether the float32 gradient is bitwise that of one process with both ranks' batches."""
    run = ShardedRun(dtype=torch.float32)
    parts = [samples(4, rank).float() for rank in (0, 1)]
    run.step([parts[run.rank]])
    for part in parts:
        (mean_loss(run.plain, part) / 2).backward()
    return torch.equal(run.gradient, run.plain_gradient())


def tokens_of_several_lengths() -> list[float]:
    """Compare sentences one by one, without a weight_fn, with all six at once."""
    run = ShardedRun(llama)
    sentences = [[sentence(length, seed=10 * rank + length) for length in LENGTHS[rank]] for rank in (0, 1)]
    result = run.step(sentences[run.rank], lambda model, batch: model(**batch).loss)
    loss = run.plain(**padded([each for of_rank in sentences for each in of_rank])).loss
    return [run.difference(loss), abs(result.loss - loss.item())]


def sentence(length: int, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(16, (1, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def padded(sentences: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([each["input_ids"][0] for each in sentences], True, padding_value=-100)
    mask = tokens != -100
    return {"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": tokens}


def clipped() -> list[float]:
    run = ShardedRun()
    parts = [samples(4, rank) for rank in (0, 1)]
    result = run.step([parts[run.rank]], max_grad_norm=0.1)
    mean_loss(run.plain, torch.cat(parts)).backward()
    norm = nn.utils.clip_grad_norm_(run.plain.parameters(), 0.1)
    difference = (run.gradient - run.plain_gradient()).abs().max()
    return [difference.item(), abs(result.grad_norm - norm.item()), run.gradient.norm().item()]


def non_finite(precision: str, each_batch: bool) -> dict[str, Any]:
    run = ShardedRun(dtype=torch.float32, precision=precision, each_batch=each_batch)
    parts = list(samples(8, run.rank).float().split(2))
    run.step(parts)
    before = run.weights()
    if run.rank == 1:
        parts[2] = parts[2] * float("nan")
    return {"message": error_of(lambda: run.step(parts)), "before": before, "after": run.weights()}


def after_an_error(precision: str) -> list[bool]:
    """Return whether later steps are unaffected, for errors in and after the third micro-batch's forward."""
    equal = []
    for where in ("forward", "loss"):
        run, other = (ShardedRun(dtype=torch.float32, precision=precision) for _ in range(2))
        parts = list(samples(8, run.rank).float().split(2))
        calls: list[int] = []

        def failing(model: nn.Module, batch: Tensor, where: str = where, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            if len(calls) == 3 and where == "forward":
                return mean_loss(model, batch[:, :3])
            if len(calls) == 3:
                raise ValueError("injected")
            return mean_loss(model, batch)

        try:
            run.step(parts, failing)
        except (RuntimeError, ValueError):
            calls.append(4)
        assert calls[-1] == 4
        run.step(parts[:2])
        other.step(parts[:2])
        equal.append(torch.equal(run.gradient, other.gradient) and run.weights() == other.weights())
    return equal


def gradient_cache() -> dict[str, Any]:
    run = ShardedRun()
    parts = [samples(6, 0), samples(6, 1)]
    directions = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    cache = GradientCache(run.accelerator, run.model, lambda output: sliced_wasserstein(output, directions))
    with run.counting():
        result = cache.step(parts[run.rank].split(2), run.optimizer)
    loss = sliced_wasserstein(run.plain(torch.cat(parts)), directions)
    unequal = parts[run.rank].split(2 + run.rank)
    return {
        "difference": run.difference(loss),
        "loss difference": abs(result.loss - loss.item()),
        "exchanges": run.num_exchanges,
        "unequal": error_of(lambda: cache.backward(unequal)),
    }


def micro_batcher() -> dict[str, Any]:
    run, other = ShardedRun(), ShardedRun()
    part = samples(5, run.rank)
    batcher = MicroBatcher(run.accelerator, 2)
    batcher.train_step(run.model, mean_loss, part, run.optimizer)
    other.step(part.split(2))
    return {
        "equal": torch.equal(run.gradient, other.gradient) and run.weights() == other.weights(),
        "notes": notes_of_running_out(batcher, run.model, part, run.optimizer),
        "size": batcher.micro_batch_size,
        "search": error_of(lambda: find_micro_batch(run.accelerator, run.model, mean_loss, part, effective_batch=10)),
    }


def outcomes() -> dict[str, Any]:
    return {
        "splits": splits(),
        "splits by hand": splits(by_hand=True),
        "splits, each batch": splits(each_batch=True),
        "one batch each": one_batch_each(),
        "tokens": tokens_of_several_lengths(),
        "clipped": clipped(),
        "non-finite": [non_finite(precision, each) for precision in ("no", "bf16") for each in (False, True)],
        "after an error": {precision: after_an_error(precision) for precision in ("no", "bf16")},
        "gradient cache": gradient_cache(),
        "micro-batcher": micro_batcher(),
    }
