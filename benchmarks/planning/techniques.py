"""Predicted peak and time of a training step with each technique, for one shape, without a GPU.

    python -m benchmarks.planning.techniques

The step is a whole training step of a decoder shaped like Qwen3-0.6B, with 4 sequences of 2,048 tokens and AdamW, on
tensors without memory (`estimate_peak_memory`). Times are predicted for one card.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common import CPU, BenchmarkParser, environment, finish, print_table
from hf_memopt.planning import Job
from hf_memopt.planning.accounting.categories import ACTIVATION
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.planning.workloads.of_job import given_step, workload_of

SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 16}
BATCH = 4
# Precision, checkpointing and offloading of each technique.
TECHNIQUES = {
    "plain, float32": ("no", "none", "off"),
    "mixed precision": ("bf16", "none", "off"),
    "+ offloaded where free (auto)": ("bf16", "none", "auto"),
    "+ everything offloaded (all)": ("bf16", "none", "all"),
    "+ selective checkpointing": ("bf16", "selective", "off"),
    "+ selective checkpointing, all offloaded": ("bf16", "selective", "all"),
    "+ full checkpointing": ("bf16", "full", "off"),
    "+ full checkpointing, inputs offloaded": ("bf16", "full", "inputs"),
}


def seq_len(toy: bool) -> int:
    return 64 if toy else 2048


def measure(gpu: str, toy: bool) -> dict[str, dict[str, Any]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(SHAPE | (TOY if toy else {})))
        for name, (precision, checkpointing, offload) in tqdm(TECHNIQUES.items(), unit="technique"):
            settings = {"precision": precision, "checkpointing": checkpointing, "offload": offload, "loss": "full"}
            job = Job(str(config), seq_len=seq_len(toy), batch_size=BATCH, dtype="float32", **settings)
            step, _ = given_step(job, workload_of(job))
            estimate = run_isolated(partial(simulate_step, step, gpu=gpu))
            found[name] = {
                "peak_bytes": estimate.peak_bytes,
                "activation_bytes": estimate.breakdown.get(ACTIVATION, 0),
                "host_bytes": estimate.host_bytes,
                "step_ms": estimate.step_ms,
                "stall_ms": estimate.stall_ms,
            }
    return found


def print_report(results: dict[str, Any]) -> None:
    found = results["techniques"]
    plain_ms = found["mixed precision"]["step_ms"]
    rows = [
        [
            name,
            *(f"{row[key] / 2**30:.1f}" for key in ("peak_bytes", "activation_bytes", "host_bytes")),
            f"{row['step_ms'] / plain_ms - 1:+.0%}",
        ]
        for name, row in found.items()
    ]
    shape = results["shape"]
    print(f"predicted for {results['predicted_for']}, not measured; times are beside those of mixed precision")
    model = "a decoder shaped like Qwen3-0.6B" if shape.items() >= SHAPE.items() else "a toy decoder"
    print(f"a step of {model}, {shape['batch']} x {shape['seq_len']:,} tokens, all weights trained by AdamW")
    print_table(["technique", "peak GiB", "activations GiB", "host GiB", "time"], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--gpu", default="rtx4090", help="GPU to predict for (default: %(default)s)")
    parser.add_argument("--toy", action="store_true", help="a tiny shape, for a test")
    options = parser.options(arguments)
    results = {
        **environment(CPU),
        "benchmark": "planning.techniques",
        "predicted_for": options.gpu,
        "shape": {**SHAPE, **(TOY if options.toy else {}), "batch": BATCH, "seq_len": seq_len(options.toy)},
        "techniques": measure(options.gpu, options.toy),
    }
    finish(results, print_report, options.output, "techniques-predicted")


if __name__ == "__main__":
    main()
