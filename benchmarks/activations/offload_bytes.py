"""Bytes that offloaders copy to the host in one training step of a Llama-shaped model, against what they have to.

    python -m benchmarks.activations.offload_bytes

Every tensor that autograd saves passes through an offloader's pack hook. What it hands over and what the hook copies
to the host is counted on the CPU, to the byte: neither depends on the device. No accelerator is needed, and no time
is measured.
"""

import argparse
import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import MIB, environment, print_table, results_path, write_results
from hf_memopt import ActivationOffloader, SyncCopier

# Llama 3's proportions: heads of 64, four query heads to a key head, an MLP 3.5 times as wide.
SIZES = {
    "real": {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4},
    "toy": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1},
}
TOKENS = {"real": 1024, "toy": 64}
VOCABULARY = {"real": 8192, "toy": 256}
TARGET_RATIO = 1.0  # ours: every storage once
HEADER = ["offloader", "copied MiB", "/ unique", "weights MiB", "left MiB", "/ unique", "gradients"]

CPU = torch.device("cpu")
Gradients = list[Tensor]


class PackCounter(TorchDispatchMode):
    """Counts what pack hooks are given and what they copy, whoever's hooks they are.

    Args:
        weights: tensors whose storages are weights.

    Every pair of saved-tensor hooks that is entered inside has its pack function counted.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._saved: dict[int, tuple[StorageWeakRef, int]] = {}
        self.copied_bytes = 0
        self.weight_bytes = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count inside."""
        enter = saved_tensors_hooks.__enter__

        def enter_counted(hooks: saved_tensors_hooks) -> None:
            hooks.pack_hook = self._counted(hooks.pack_hook)
            enter(hooks)

        with patch.object(saved_tensors_hooks, "__enter__", enter_counted):
            yield

    def bytes_alive(self) -> int:
        """Bytes of those saved storages that still exist, on what stands for the device."""
        return sum(num_bytes for ref, num_bytes in self._saved.values() if not ref.expired())

    def _counted(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def counted(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._weights:
                self._saved[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            with self:
                return pack(tensor)

        return counted

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.copied_bytes += args[0].nbytes
            if args[1].untyped_storage().data_ptr() in self._weights:
                self.weight_bytes += args[0].nbytes
        return function(*args, **(kwargs or {}))


class _Census:
    """Keeps every saved storage alive, so that no address is given to a second one while it is counted."""

    def __init__(self, weights: list[Tensor]) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.handed_over_bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.handed_over_bytes += tensor.nbytes
        if storage.data_ptr() not in self._weights:
            self._storages[storage.data_ptr()] = storage
        return tensor.detach()

    @property
    def unique_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


def ours(model: nn.Module) -> AbstractContextManager[Any]:
    """This library's, with nothing too small for it."""
    return ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier()).offload_context(model)


def torch_save_on_cpu(model: nn.Module) -> AbstractContextManager[Any]:
    """torch's own. With pin_memory it copies even from the CPU."""
    return save_on_cpu(pin_memory=True)


def trl_offload(model: nn.Module) -> AbstractContextManager[Any]:
    """TRL's, as its trainers install it, with its default threshold of 1 KiB.

    It looks for an accelerator and its streams as it is made, so the CPU and streams that do nothing stand in.
    """
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    with patch.object(torch.accelerator, "current_accelerator", lambda: CPU):
        manager = get_act_offloading_ctx_manager(model, use_pin_memory=False)
    manager.device_module = StandInDevice
    manager.s1 = StandInDevice()
    return manager


class StandInDevice:
    """A device module and a stream in one, for which all work is over at once."""

    stream = staticmethod(contextlib.nullcontext)

    def __init__(self) -> None:
        for name in ("wait_stream", "wait_event", "record_event", "synchronize"):
            setattr(self, name, lambda *events: None)

    @classmethod
    def current_stream(cls) -> "StandInDevice":
        return cls()


OFFLOADERS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "ours": ours,
    "save_on_cpu": torch_save_on_cpu,
    "TRL (stream stub)": trl_offload,
}


def build(size: str) -> tuple[nn.Module, Tensor]:
    """A Llama-shaped model in bfloat16 with random weights, and one sequence of tokens, `(1, tokens)`."""
    torch.manual_seed(0)
    shape = {**SIZES[size], "intermediate_size": 7 * SIZES[size]["hidden_size"] // 2}
    config = transformers.LlamaConfig(**shape, vocab_size=VOCABULARY[size])
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    return model, torch.randint(0, VOCABULARY[size], (1, TOKENS[size]))


def take_gradients(model: nn.Module) -> Gradients:
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def plain(model: nn.Module, tokens: Tensor) -> tuple[dict[str, int], Gradients]:
    """What autograd saves in one step without an offloader, weights not counted as unique, and the gradients."""
    census = _Census([*model.parameters(), *model.buffers()])
    with saved_tensors_hooks(census.pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    found = {"unique_bytes": census.unique_bytes, "handed_over_bytes": census.handed_over_bytes}
    loss.backward()
    return found, take_gradients(model)


def measure(name: str, model: nn.Module, tokens: Tensor, unique_bytes: int, want: Gradients) -> dict[str, Any]:
    """One offloader's step."""
    counter = PackCounter([*model.parameters(), *model.buffers()])
    context = OFFLOADERS[name](model)
    with counter.watching(), context:
        loss = model(input_ids=tokens, labels=tokens).loss
        left_bytes = counter.bytes_alive()
    loss.backward()
    return {
        "copied_bytes": counter.copied_bytes,
        "copied_over_unique": counter.copied_bytes / unique_bytes,
        "weight_bytes": counter.weight_bytes,
        "left_bytes": left_bytes,
        "gradients_equal": all(map(torch.equal, take_gradients(model), want)),
    }


def run(size: str) -> dict[str, Any]:
    """The whole benchmark."""
    model, tokens = build(size)
    saved, want = plain(model, tokens)
    offloaders: dict[str, Any] = {}
    for name in OFFLOADERS:
        if name.startswith("TRL") and importlib.util.find_spec("trl") is None:
            offloaders[name] = {"error": "not installed"}
        else:
            offloaders[name] = measure(name, model, tokens, saved["unique_bytes"], want)
    return {
        **environment(CPU),
        "benchmark": "activations.offload_bytes",
        "size": size,
        "num_tokens": TOKENS[size],
        "dtype": "bfloat16",
        "shape": SIZES[size],
        "target_ratio": TARGET_RATIO,
        **saved,
        "offloaders": offloaders,
    }


def print_report(results: dict[str, Any]) -> None:
    """The table and the target."""
    unique = results["unique_bytes"]
    shape = results["shape"]
    print(
        f"Llama-shaped, {shape['num_hidden_layers']} layers of width {shape['hidden_size']}, "
        f"{results['num_tokens']} tokens, {results['dtype']}\n"
        f"saved for backward: {unique / MIB:.1f} MiB of distinct storages, weights excluded; "
        f"{results['handed_over_bytes'] / MIB:.1f} MiB as views, weights included"
    )
    print_table(HEADER, [_row(name, found, unique) for name, found in results["offloaders"].items()])
    ratio, target = results["offloaders"]["ours"]["copied_over_unique"], results["target_ratio"]
    print(
        f"ours, copied / unique: {ratio:.2f} (target {target:.2f}: {'met' if round(ratio, 2) == target else 'missed'})"
    )


def _row(name: str, found: dict[str, Any], unique_bytes: int) -> list[str]:
    if "error" in found:
        return [name, found["error"], *["-"] * (len(HEADER) - 2)]
    return [
        name,
        f"{found['copied_bytes'] / MIB:.1f}",
        f"{found['copied_over_unique']:.2f}",
        f"{found['weight_bytes'] / MIB:.1f}",
        f"{found['left_bytes'] / MIB:.1f}",
        f"{found['left_bytes'] / unique_bytes:.2f}",
        "equal" if found["gradients_equal"] else "different",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="real", help="which model (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args(arguments)
    results = run(options.size)
    print_report(results)
    print("wrote", write_results(results, options.output or results_path("offload-bytes", CPU)))


if __name__ == "__main__":
    main()
