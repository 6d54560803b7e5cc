"""Slowdown of a step by mode "auto" for models of many small operations, on the CPU.

    python -m benchmarks.activations.small_operations

RWKV and Mamba loop over tokens in Python, an LSTM reads packed sequences, and a UNet has few large operations beside
them. Each is trained plainly, with `ActivationOffloader` and its default `max_slowdown`, and with torch's
`save_on_cpu`, which copies everything, from the CPU too. Mode "auto" first gets the steps to record, plan, and compare
its plans with the plain step. Then kinds take turns within each round. The clock is the process's CPU time, so that
other processes disturb little; ratios are those of medians.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils.rnn import pack_sequence

from benchmarks.common import CPU, BenchmarkParser, environment, finish, print_table
from benchmarks.targets import Verdict
from benchmarks.timing import median_and_spread
from hf_memopt import ActivationOffloader, SyncCopier

THRESHOLD_MB = 0.25
NUM_WARM_UPS = 72  # two are recorded, one is plain, and each of four plans is compared in one to eight pairs
TARGET_RATIO = 1.05
HEADER = ["model", "plain ms", "ours", "save_on_cpu", "target of ours", "ours moves MiB a step"]

Forward = Callable[[], Tensor]
Model = tuple[nn.Module, Forward]


def rwkv() -> Model:
    from transformers import RwkvConfig, RwkvForCausalLM

    sizes = {"hidden_size": 512, "attention_hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    return _causal_lm(RwkvForCausalLM(RwkvConfig(vocab_size=96, **sizes)), 4, 128)


def mamba() -> Model:
    from transformers import MambaConfig, MambaForCausalLM

    return _causal_lm(MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=256, num_hidden_layers=2)), 4, 128)


def unet() -> Model:
    from diffusers import UNet2DModel

    blocks = {
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    model = UNet2DModel(sample_size=32, layers_per_block=1, norm_num_groups=8, **blocks)
    images, times = torch.randn(4, 3, 32, 32), torch.tensor([1, 50, 200, 900])
    return model, lambda: model(images, times).sample.square().mean()


def packed_lstm() -> Model:
    model = nn.LSTM(128, 256, num_layers=2)
    packed = pack_sequence([torch.randn(length, 128) for length in range(128, 96, -2)])
    return model, lambda: model(packed)[0].data.square().mean()


MODELS: dict[str, Callable[[], Model]] = {"RWKV": rwkv, "Mamba": mamba, "UNet": unet, "packed LSTM": packed_lstm}


def _causal_lm(model: Any, batch_size: int, length: int) -> Model:
    tokens = torch.randint(0, 96, (batch_size, length))
    return model.train(), lambda: model(input_ids=tokens, labels=tokens).loss


def step_ms(model: nn.Module, forward: Forward, hooks: AbstractContextManager[Any]) -> float:
    start = time.process_time()
    with hooks:
        loss = forward()
    loss.backward()
    elapsed_s = time.process_time() - start
    model.zero_grad()
    return 1e3 * elapsed_s


def measure(make: Callable[[], Model], num_rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, forward = make()
    offloader = ActivationOffloader(offload_threshold_mb=THRESHOLD_MB, copier=SyncCopier())
    kinds: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext,
        "ours": lambda: offloader.offload_context(model),
        "save_on_cpu": save_on_cpu,
    }
    for _ in range(NUM_WARM_UPS):
        step_ms(model, forward, kinds["ours"]())
    before = offloader.stats
    rounds = [{name: step_ms(model, forward, hooks()) for name, hooks in kinds.items()} for _ in range(num_rounds)]
    after = offloader.stats
    times = {name: median_and_spread([each[name] for each in rounds]) for name in kinds}
    return {
        "step_ms": times,
        "ratio": {name: times[name]["median"] / times["plain"]["median"] for name in kinds},
        "moved_bytes": (after.bytes_moved - before.bytes_moved) / num_rounds,
        "recomputed_bytes": (after.bytes_recomputed - before.bytes_recomputed) / num_rounds,
    }


def print_report(results: dict[str, Any]) -> None:
    rows = []
    for name, found in results["models"].items():
        ratio, target = found["ratio"], results["target_ratio"]
        verdict = f"{target:g} {Verdict(name, ratio['ours'], target).outcome}"
        ratios = f"{ratio['ours']:.2f}", f"{ratio['save_on_cpu']:.2f}"
        moved = f"{found['moved_bytes'] / 2**20:.1f}"
        rows.append([name, f"{found['step_ms']['plain']['median']:.0f}", *ratios, verdict, moved])
    print(f"CPU time of a step over the plain one's, medians of {results['num_rounds']} rounds")
    print_table(HEADER, rows)


def main(arguments: list[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="per model (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    options = parser.options(arguments)
    torch.set_num_threads(1)
    results = {
        **environment(CPU),
        "benchmark": "activations.small_operations",
        "num_rounds": options.rounds,
        "offload_threshold_mb": THRESHOLD_MB,
        "target_ratio": TARGET_RATIO,
        "models": {name: measure(MODELS[name], options.rounds) for name in options.models},
    }
    finish(results, print_report, options.output, "small-operations")


if __name__ == "__main__":
    main()
