"""The activation benchmark's model, the bytes that autograd saves for it, and digests of its gradients."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModel, Qwen3Config, Qwen3Model

from benchmarks.common import current_device

# Widths and heads of Qwen3-8B. Its vocabulary of 151,936 is left out: head and loss are not compared.
SIZES: dict[str, dict[str, int]] = {
    "real": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "toy": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
    },
}
VOCABULARY = 1024


def qwen3(size: str, num_layers: int, vocabulary: int, device: torch.device) -> Qwen3Model:
    torch.manual_seed(0)
    config = Qwen3Config(
        **SIZES[size], num_hidden_layers=num_layers, vocab_size=vocabulary, use_cache=False, attention_dropout=0.0
    )
    with torch.device(device):
        return AutoModel.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).train()


def build_model(size: str, num_layers: int, device: torch.device) -> Qwen3Model:
    model = qwen3(size, num_layers, VOCABULARY, device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


@dataclass(frozen=True)
class Work:
    """A sequence of random tokens, `(1, num_tokens)`; the loss is the last hidden state's product with `direction`."""

    model: nn.Module
    tokens: Tensor
    direction: Tensor

    @staticmethod
    def make(model: nn.Module, num_tokens: int, device: torch.device) -> "Work":
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, VOCABULARY, (1, num_tokens), generator=generator)
        direction = torch.randn(model.config.hidden_size, generator=generator).to(torch.bfloat16)
        return Work(model, tokens.to(device), direction.to(device))

    def loss(self) -> Tensor:
        hidden = self.model(input_ids=self.tokens).last_hidden_state
        return (hidden * self.direction).float().mean()

    def step(self, context: Callable[[], Any] = contextlib.nullcontext) -> None:
        with context():
            loss = self.loss()
        loss.backward()

    def longer(self, num_tokens: int) -> "Work":
        return Work.make(self.model, num_tokens, self.tokens.device)

    def clear(self) -> None:
        """Zero the gradients in place, so that their memory is constant."""
        self.model.zero_grad(set_to_none=False)


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd saves in one forward pass; on pinned host memory with torch's rounding to powers of two."""

    unique_bytes: int  # of distinct storages, weights excluded
    unique_pinned_bytes: int
    views_bytes: int  # of every saved tensor by itself, weights included
    views_pinned_bytes: int

    def scaled(self, factor: float) -> "Saved":
        return Saved(*(round(factor * num_bytes) for num_bytes in astuple(self)))

    def beyond(self, smaller: "Saved", times: int) -> "Saved":
        """Return the bytes with `times` more layers, if `smaller` had one layer fewer."""
        pairs = zip(astuple(self), astuple(smaller), strict=True)
        return Saved(*(mine + times * (mine - less) for mine, less in pairs))


def saved_by(work: Work) -> Saved:
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*work.model.parameters(), *work.model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
    views: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        views.append(tensor.nbytes)
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        work.loss()
    unique = [storage.nbytes() for storage in storages.values()]
    return Saved(sum(unique), sum(map(_pinned_bytes, unique)), sum(views), sum(map(_pinned_bytes, views)))


def _pinned_bytes(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def only_layers(model: nn.Module, num_layers: int) -> AbstractContextManager[Any]:
    return patch.object(model.config, "num_hidden_layers", num_layers)


def saved_by_all_layers(work: Work) -> Saved:
    """Extrapolate: every layer saves as much as the second one."""
    counts = []
    for num_layers in (1, 2):
        with only_layers(work.model, num_layers):
            counts.append(saved_by(work))
    return counts[1].beyond(counts[0], work.model.config.num_hidden_layers - 2)


def temporary_bytes(work: Work, device: torch.device) -> int | None:
    """Return the bytes of a step's peak beyond weights, gradients and saved activations; None on the CPU.

    Measured on two plain layers, whose peak is at the start of backward, when everything is saved.
    """
    if device.type == "cpu":
        return None
    with only_layers(work.model, 2):
        saved = saved_by(work).unique_bytes
        work.step()
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        work.step()
        peak = torch.accelerator.max_memory_allocated(device)
    work.clear()
    return int(peak - before - saved)


def compared(step: Callable[[], object], model: nn.Module) -> dict[str, Any]:
    """Return the digest of the gradients of a deterministic step, or the operation that has no such kernel."""
    try:
        with deterministic():
            step()
        return {"gradient_digest": gradient_digest(model)}
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        return {"not_compared": str(error)}


def gradient_digest(model: nn.Module) -> str:
    """Return a hash of two sums over each gradient's bits, computed on the device: gradients may have many GiB."""
    sums = [_sums(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


def _sums(gradient: Tensor) -> tuple[int, int]:
    bits = gradient.detach().contiguous().view(torch.int16).flatten().to(torch.int64)
    positions = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int(bits.sum()), int(bits.mul_(positions).sum())


def flash_attention(device: torch.device) -> AbstractContextManager[None]:
    """Restrict attention to torch's flash kernel: cuDNN's, which torch may prefer, has no deterministic backward."""
    if device.type == "cpu":  # has one kernel
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def prepared_device() -> torch.device:
    """Return the device, where kernels can repeat their bits; on a CPU one thread is enough for tensors of toys."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first matrix product
    device = current_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    return device


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use kernels that repeat their bits, with `CUBLAS_WORKSPACE_CONFIG` set before the first matrix product."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
