"""Bytes copied, bytes kept on the device and operations repeated in a training step, by switch for activation memory.

    python -m benchmarks.activations.offload_bytes

One step of a Llama-shaped model is trained with torch's, transformers', accelerate's, TRL's and this library's switches
in turn. Copied bytes, the highest number of bytes held, and operations are counted on the CPU, exactly. None of them
depends on the device, except that `ours auto` decides by measured times. No time is reported.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.activations import modes
from benchmarks.activations.model import Saved, saved_by
from benchmarks.activations.modes import Handling, Setting
from benchmarks.cells import UnavailableError
from benchmarks.common import CPU, MIB, BenchmarkParser, environment, finish, host_limit_gib, print_table

# Llama 3's proportions: heads of 64, four query heads to a key head, an MLP 3.5 times as wide.
SIZES = {
    "real": {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4},
    "toy": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1},
}
TOKENS = {"real": 1024, "toy": 64}
VOCABULARY = {"real": 2048, "toy": 256}
TARGET_RATIO = 1.0  # this library copies every storage once
HEADER = ["switch", "copied MiB", "weights MiB", "left MiB", "highest MiB", "/ plain", "computed again", "gradients"]

Gradients = list[Tensor]


class StepCounter(TorchDispatchMode):
    """A counter of the bytes that a training step on the CPU copies away, and of those that it holds beside `fixed`.

    A CPU has one memory, so copies tell host and device apart: the destination of a copy is host memory until an
    operation reads it in place. Temporaries within an operation are not counted.
    """

    def __init__(self, fixed: list[Tensor]) -> None:
        super().__init__()
        self._fixed = {tensor.untyped_storage()._cdata for tensor in fixed}
        self._host: dict[int, StorageWeakRef] = {}
        self._device: dict[int, tuple[StorageWeakRef, int]] = {}
        self.copied_bytes = 0
        self.weight_bytes = 0
        self.highest_bytes = 0

    def bytes_alive(self) -> int:
        self._device = {key: each for key, each in self._device.items() if not each[0].expired()}
        return sum(num_bytes for _, num_bytes in self._device.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.copy_.default:
            self._copied(*args[:2])
        elif not function.is_view:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and self._is_on_host(tensor):
                    del self._host[tensor.untyped_storage()._cdata]
                    self._hold(tensor)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor)
        if not function.name().startswith("aten::empty"):  # may become the destination of a copy
            self.highest_bytes = max(self.highest_bytes, self.bytes_alive())
        return result

    def _copied(self, destination: Tensor, source: Tensor) -> None:
        if self._is_on_host(source):
            return
        storage = destination.untyped_storage()
        self._device.pop(storage._cdata, None)
        self._host[storage._cdata] = StorageWeakRef(storage)
        self.copied_bytes += destination.nbytes
        if source.untyped_storage()._cdata in self._fixed:
            self.weight_bytes += destination.nbytes

    def _is_on_host(self, tensor: Tensor) -> bool:
        ref = self._host.get(tensor.untyped_storage()._cdata)
        return ref is not None and not ref.expired()

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._fixed and not self._is_on_host(tensor):
            self._device[storage._cdata] = StorageWeakRef(storage), storage.nbytes()


def accelerate_offload(setting: Setting) -> Handling:
    """Apply accelerate's `fsdp_activation_checkpointing_offload: true` to the layers, without sharding them."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
    )
    fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), setting.model)
    return Handling()


def trl_offload(setting: Setting) -> Handling:
    """Use TRL's `activation_offloading=True`, as its trainers install it, with its default threshold of 1 KiB.

    Its constructor needs an accelerator and streams, so the CPU and streams that do nothing take their place.
    """
    make_manager = modes.managers_of_trl()
    with patch.object(torch.accelerator, "current_accelerator", lambda: CPU):
        manager = make_manager(setting.model, use_pin_memory=False)
    manager.device_module = StandInDevice
    manager.s1 = StandInDevice()
    return Handling(lambda: manager)


class StandInDevice:
    """A device module and a stream in one, whose work is always complete."""

    stream = staticmethod(contextlib.nullcontext)

    def __init__(self) -> None:
        for name in ("wait_stream", "wait_event", "record_event", "synchronize"):
            setattr(self, name, lambda *events: None)

    @classmethod
    def current_stream(cls) -> "StandInDevice":
        return cls()


SWITCHES: dict[str, Callable[[Setting], Handling]] = {
    "plain": modes.none,
    "checkpointing": modes.checkpointing,
    "transformers offload": partial(modes.checkpointing, offload=True),
    "accelerate offload": accelerate_offload,
    "ours inputs": modes.ours_inputs,
    "save_on_cpu": modes.torch_save_on_cpu,
    "TRL (stream stub)": trl_offload,
    "ours all": partial(modes.ours, mode="all"),
    "ours auto 20 %": partial(modes.ours_auto, share=0.20),
}


@dataclass(frozen=True)
class Work:
    """A model and one sequence of tokens, `(1, tokens)`, also used as labels."""

    model: nn.Module
    tokens: Tensor

    @staticmethod
    def make(size: str) -> "Work":
        torch.manual_seed(0)
        shape = {**SIZES[size], "intermediate_size": 7 * SIZES[size]["hidden_size"] // 2}
        config = transformers.LlamaConfig(**shape, vocab_size=VOCABULARY[size], use_cache=False)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        return Work(model, torch.randint(0, VOCABULARY[size], (1, TOKENS[size])))

    def loss(self) -> Tensor:
        return self.model(input_ids=self.tokens, labels=self.tokens).loss

    def step(self, context: Callable[[], Any] = contextlib.nullcontext) -> None:
        with context():
            loss = self.loss()
        loss.backward()


def take_gradients(model: nn.Module) -> Gradients:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=False)
    return found


def flops_of(work: Work, handling: Handling) -> int:
    """Count a step's floating-point operations. Counting changes some kernels, so its gradients are dropped."""
    with FlopCounterMode(display=False) as counter:
        work.step(handling.context)
    take_gradients(work.model)
    return counter.get_total_flops()


def measure(name: str, start: Work, saved: Saved, plain_flops: int, want: Gradients) -> dict[str, Any]:
    work = Work(copy.deepcopy(start.model), start.tokens)
    try:
        handling = SWITCHES[name](Setting(work.model, CPU, saved, round(host_limit_gib() * 2**30)))
    except UnavailableError as error:
        return {"error": str(error)}
    # One step at least, so that gradients are allocated.
    modes.settle(handling, partial(work.step, handling.context), num_passes=1)
    take_gradients(work.model)
    weights = [*work.model.parameters(), *work.model.buffers()]
    fixed = [*weights, *(weight.grad for weight in weights if weight.grad is not None)]
    with StepCounter(fixed) as counter:
        with handling.context():
            loss = work.loss()
            left_bytes = counter.bytes_alive()
        loss.backward()
    gradients = take_gradients(work.model)
    return {
        "copied_bytes": counter.copied_bytes,
        "copied_over_unique": counter.copied_bytes / saved.unique_bytes,
        "weight_bytes": counter.weight_bytes,
        "left_bytes": left_bytes,
        "highest_bytes": counter.highest_bytes,
        "flops_again": flops_of(work, handling) - plain_flops,
        "gradients_equal": all(map(torch.equal, gradients, want)),
    }


def run(size: str) -> dict[str, Any]:
    work = Work.make(size)
    saved = saved_by(work)
    work.step()
    want = take_gradients(work.model)
    flops = flops_of(work, Handling())
    return {
        **environment(CPU),
        "benchmark": "activations.offload_bytes",
        "size": size,
        "num_tokens": TOKENS[size],
        "dtype": "bfloat16",
        "shape": SIZES[size],
        "target_ratio": TARGET_RATIO,
        "unique_bytes": saved.unique_bytes,
        "handed_over_bytes": saved.views_bytes,
        "flops": flops,
        "switches": {name: measure(name, work, saved, flops, want) for name in SWITCHES},
    }


def print_report(results: dict[str, Any]) -> None:
    shape = results["shape"]
    print(
        f"Llama-shaped, {shape['num_hidden_layers']} layers of width {shape['hidden_size']}, "
        f"{results['num_tokens']} tokens, {results['dtype']}\n"
        f"saved for backward: {results['unique_bytes'] / MIB:.1f} MiB of distinct storages, weights excluded; "
        f"{results['handed_over_bytes'] / MIB:.1f} MiB as views, weights included"
    )
    print_table(HEADER, [_row(name, found, results) for name, found in results["switches"].items()])
    ratio, target = results["switches"]["ours all"]["copied_over_unique"], results["target_ratio"]
    verdict = "met" if round(ratio, 2) == target else "missed"
    print(f"ours all, copied / unique: {ratio:.2f} (target {target:.2f}: {verdict})")


def _row(name: str, found: dict[str, Any], results: dict[str, Any]) -> list[str]:
    if "error" in found:
        return [name, found["error"], *["-"] * (len(HEADER) - 2)]
    sizes = [found[key] / MIB for key in ("copied_bytes", "weight_bytes", "left_bytes", "highest_bytes")]
    return [
        name,
        *(f"{size:.1f}" for size in sizes),
        f"{found['highest_bytes'] / results['switches']['plain']['highest_bytes']:.2f}",
        f"{found['flops_again'] / results['flops']:.0%}",
        "equal" if found["gradients_equal"] else "different",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="real", help="which model (default: %(default)s)")
    options = parser.options(arguments)
    results = run(options.size)
    finish(results, print_report, options.output, "offload-bytes")


if __name__ == "__main__":
    main()
