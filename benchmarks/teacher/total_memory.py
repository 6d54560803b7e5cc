"""Predicted device memory of a full-size SmolVLA's reflow training step, for each mode of the teacher's weights.

    python -m benchmarks.teacher.total_memory

The step is lerobot's own on tensors without memory, as `hf-memopt plan` runs it: the teacher's target by ten Euler
steps, the student's forward and backward, clipping, AdamW. SmolVLA has the shape of smolvla_base: three cameras of
256x256, resized to 512x512. The prefix is computed twice, by teacher and student, or once for both. The student's
frozen VLM stays on the device, or streams from the host (`vlm_home`).
"""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from safetensors.torch import save_file
from tqdm import tqdm

from benchmarks.common import CPU, BenchmarkParser, environment, finish, print_table
from benchmarks.teacher.smolvla import SIZES, Size, features
from hf_memopt import estimate_peak_memory
from hf_memopt.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.recipes.common.auto_plan import PRECISION
from hf_memopt.recipes.reflow.smolvla_toy import write_vlm
from hf_memopt.recipes.reflow.workload import SmolVLAReflow

HOMES = ("resident", "swap", "stream")
HEADER = ["teacher", "batch", "peak GiB", "teacher's", "student's", "states", "activations", "host GiB"]
KINDS = (
    ("teacher", "prefetch buffers"),
    ("parameters", "frozen parameters", "streamed weights", "buffers"),
    ("gradients", "optimizer state"),
    ("activations",),
)


def make_student(size: Size, folder: Path, share_prefix: str, vlm_home: str) -> SmolVLAReflow:
    """Return the workload of a student and its teacher, from configurations without weights."""
    shape = {
        **size.settings,
        "device": "cpu",
        "vlm_model_name": str(write_vlm(folder / "vlm", size.vlm)),
        **features(size),
    }
    teacher = folder / "teacher"
    teacher.mkdir()
    SmolVLAConfig(**shape).save_pretrained(teacher)
    save_file({"nothing": torch.zeros(1)}, teacher / "model.safetensors")  # never read
    reflow = {"use_reflow": True, "teacher_model_path": str(teacher)}
    shared = {"share_prefix": share_prefix, "vlm_home": vlm_home}
    return SmolVLAReflow(SmolVLAReflowConfig(**{**shape, **reflow, **shared}), folder)


def measure(size: Size, batch_sizes: list[int], precision: str, gpu: str) -> list[dict[str, Any]]:
    homes = [*((home, "device") for home in HOMES), ("swap", "host")]
    cells = [(share, *home, batch) for share in ("off", "on") for home in homes for batch in batch_sizes]
    found = []
    for share_prefix, home, vlm_home, batch_size in tqdm(cells, unit="step"):
        with tempfile.TemporaryDirectory() as folder:
            workload = make_student(size, Path(folder), share_prefix, vlm_home)
            workload.effective_batch = batch_size
            step = workload.simulated({"teacher_offload": home, PRECISION: precision}, batch_size)
            estimate = estimate_peak_memory(step.setup, step.step, num_steps=step.num_steps, gpu=gpu)
        found.append(
            {
                "share_prefix": share_prefix,
                "teacher_offload": home,
                "vlm_home": vlm_home,
                "batch_size": batch_size,
                "peak_bytes": estimate.peak_bytes,
                "host_bytes": estimate.host_bytes,
                "breakdown": estimate.breakdown,
                "streamed": None if estimate.streamed is None else asdict(estimate.streamed),
            }
        )
    return found


def print_report(results: dict[str, Any]) -> None:
    print(f"predicted for {results['predicted_for']}, not measured: a reflow step of SmolVLA ({results['size']} size)")
    rows = []
    for cell in results["cells"]:
        name = f"{cell['teacher_offload']}{', one prefix' if cell['share_prefix'] == 'on' else ''}"
        name += ", VLM streams" if cell["vlm_home"] != "device" else ""
        kinds = [sum(cell["breakdown"].get(name, 0) for name in names) for names in KINDS]
        sizes = [f"{num_bytes / 2**30:.2f}" for num_bytes in (cell["peak_bytes"], *kinds, cell["host_bytes"])]
        rows.append([name, str(cell["batch_size"]), *sizes])
    print_table(HEADER, rows)


def main(arguments: list[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="real", help="of SmolVLA (default: %(default)s)")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 64], help="default: %(default)s")
    parser.add_argument("--precision", choices=("no", "bf16"), default="bf16", help="default: %(default)s")
    parser.add_argument("--gpu", default="rtx4090", help="GPU to predict for (default: %(default)s)")
    options = parser.options(arguments)
    results = {
        **environment(CPU),
        "benchmark": "teacher.total_memory",
        "predicted_for": options.gpu,
        "precision": options.precision,
        "size": options.size,
        "cells": measure(SIZES[options.size], options.batch_sizes, options.precision, options.gpu),
    }
    finish(results, print_report, options.output, "reflow-total-memory-predicted")


if __name__ == "__main__":
    main()
