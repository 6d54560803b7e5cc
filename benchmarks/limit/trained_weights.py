"""Full fine-tuning on a CPU in less memory than its weights take: in memory, mapped by the system, and away.

    python -m benchmarks.limit.trained_weights --folder FOLDER_ON_A_DISK

The updates of `optimizer_state`, of weights that each run loads from safetensors files, which were dropped from the
system's cache. Each run is a process of its own, alone, in a control group of its own; the kinds take turns, each
without a limit and then under it. The limit is of the whole process, from its imports on: loading is within it. It
needs a control group, since `RLIMIT_DATA` counts all weights as soon as their files are mapped.

In "all mapped" weights, gradients and state are in shared mappings of files that the system writes and reads by itself;
gradients stay there, and are set to zero. "DeepSpeed" builds its operators when it first runs, with the machine's g++,
ninja and libaio; its own AdamW rounds in another way, and its state is not compared. In "ours" state, or gradients too,
or weights as well, are in files; with "0.15 GiB", so much of the weights stays in memory, for which the limit has room.

"over start" is the peak over the memory of the process between its imports and its loading; "share", of that of the
first row. All others are as in `optimizer_state`; costs include loading. The disk needs 20 bytes per parameter.

`--size large --kinds "ours, all" --runs 1` trains a billion parameters, for which plain takes 16 GB, in 3 GB;
`python -m benchmarks.limit.picture FILE` draws it.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.limit import limited, optimizer_state
from benchmarks.limit.full_training import PLAIN
from benchmarks.limit.limited import Row
from benchmarks.limit.optimizer_state import TOO_SLOW
from hf_memopt.units import MIB

_LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 19, "vocab_size": 8000}
SIZES: dict[str, dict[str, Any]] = {
    "real": {**optimizer_state.SIZES["real"], "limit_bytes": 900 * MIB},
    "large": {"model": _LARGE, "num_tokens": 64, "limit_bytes": 3 * 10**9},
    "toy": {**optimizer_state.SIZES["toy"], "limit_bytes": 700 * MIB},
}


@dataclass(frozen=True)
class Kind:
    home: str  # of weights, gradients and state
    is_checkpointed: bool = False  # activations are computed again in backward
    budget_gib: float | None = None  # for weights that stay in memory


KINDS = {
    PLAIN: Kind("memory"),
    "plain, checkpointing": Kind("memory", is_checkpointed=True),
    "all mapped": Kind("mappings"),
    "all mapped, checkpointing": Kind("mappings", is_checkpointed=True),
    "DeepSpeed ZeRO-3, NVMe": Kind("DeepSpeed"),
    "ours, state": Kind("state"),
    "ours, state and gradients": Kind("ours", budget_gib=1.0),
    "ours, all": Kind("ours"),
    "ours, all, checkpointing": Kind("ours", is_checkpointed=True),
    "ours, all, 0.15 GiB": Kind("ours", budget_gib=0.15),
}


def write_base(model: dict[str, int], folder: Path) -> Path:
    """Write a Llama with random weights, of which one is in memory at a time."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, which printing results does not need

    config = LlamaConfig(**model, tie_word_embeddings=False, use_cache=False)
    config.save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("meta"):
        weights = dict(LlamaForCausalLM(config).named_parameters())
    for name, weight in weights.items():
        values = torch.ones(weight.shape) if weight.dim() == 1 else torch.randn(weight.shape) * config.initializer_range
        save_file({name: values}, folder / f"{name}.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in weights}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    size = SIZES[options.size]
    base = write_base(size["model"], folder / "base")
    processes = limited.Processes("trained_files", folder, limit_kind="group", too_slow=TOO_SLOW + 1)
    settings = {"base": str(base), "num_tokens": size["num_tokens"], "folder": str(folder)}
    limit = {"limit": "control group", "limit_bytes": size["limit_bytes"]}
    yield from optimizer_state.measured(options, processes, size, settings, limit, drawn=(PLAIN, "ours, all"))


def print_report(results: dict[str, Any]) -> None:
    optimizer_state.print_report(results, _over_start)


def _over_start(row: Row, free: list[Row]) -> dict[str, str]:
    def over_start(of: Row) -> float:
        return statistics.median(run["peak_bytes"] - run["rest_bytes"] for run in of["runs"])

    return {"over start": f"{over_start(row) / MIB:.0f}", "share": f"{over_start(row) / over_start(free[0]):.0%}"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = limited.make_parser("trained_weights", __doc__, KINDS, SIZES)
    limited.run_benchmark(parser.options(arguments), measure, print_report)


if __name__ == "__main__":
    main()
