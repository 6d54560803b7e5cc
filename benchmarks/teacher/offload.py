"""A whole SmolVLA reflow training step in several modes of handling the teacher's weights.

    python -m benchmarks.teacher.offload

A step is the teacher's target (10 Euler steps), the student's forward and backward, clipping and AdamW. Each mode,
dtype and batch size is measured in a process of its own, the resident teacher twice: first and last. On an accelerator
SmolVLA has its published size and random weights. Without one a toy runs, and only bytes and equality are reported.
docs/benchmarks.md explains the columns.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from benchmarks.cells import Cell, Report, Row, UnavailableError, run_cells
from benchmarks.common import CPU, BenchmarkParser, current_device, host_rss_bytes, pinned_bytes, results_path
from benchmarks.teacher.modes import MODES, OTHER_LIBRARIES, Batch, Handling, Source
from benchmarks.teacher.report import TARGETS, print_report
from benchmarks.teacher.smolvla import SIZES, Size, build_policy, draw_noise_and_time, make_batch, observe
from benchmarks.timing import NoDeviceActivityError, PhasePeaks, copied_bytes, first_step_s, timed
from hf_memopt.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_GRAD_NORM = 10.0  # lerobot's default for SmolVLA
LEARNING_RATE = 1e-4
TOO_NEW_TRANSFORMERS = Version("5.18")
UNOBSERVED = PhasePeaks(CPU)
AGAIN = "resident again"  # the reference at the end, as a control


@dataclass(frozen=True)
class Workload:
    batch: Batch
    noise: Tensor
    time: Tensor
    autocast: torch.autocast
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Answer:
    """The result of a mode's first step, on the host."""

    target: Tensor
    loss: float


def require_transformers() -> None:
    if Version(transformers.__version__) >= TOO_NEW_TRANSFORMERS:
        versions = f"needs transformers before {TOO_NEW_TRANSFORMERS}, and this is {transformers.__version__}"
        raise UnavailableError(f"lerobot's SmolVLA {versions}: it shortens a cache in a way that later versions refuse")


def measure(settings: dict[str, Any], folder: Path) -> Row:
    require_transformers()
    device, size = current_device(), SIZES[settings["size"]]
    if device.type == "cpu" and settings["size"] == "toy":
        torch.set_num_threads(1)  # tensors are too small for more
    policy, checkpoint = start(size, folder)
    num_parameters = sum(p.numel() for p in policy.parameters())
    source = Source(policy, checkpoint, device, DTYPES[settings["dtype"]])
    mode = settings["mode"] if settings["mode"] != AGAIN else "resident"
    handling = MODES[mode](source)
    work = prepare(handling, source, size, settings["batch_size"])
    answer, found = steps_of(handling, work, device, settings)
    kept = folder / f"answer-{settings['dtype']}-{settings['batch_size']}.pt"
    if settings["mode"] == "resident":
        write_whole((answer.target, answer.loss), kept)
    reference = Answer(*torch.load(kept, weights_only=True)) if kept.exists() else None
    return {"num_parameters": num_parameters, **found, **compare(answer, reference)}


def start(size: Size, folder: Path) -> tuple[SmolVLAReflowPolicy, Path]:
    """Return the initial policy and its checkpoint, made from seed 0 by the first cell and loaded by the others."""
    made = folder / "start"
    if not made.exists():
        unfinished = Path(tempfile.mkdtemp(dir=folder))
        policy = build_policy(size, folder)
        policy.save_pretrained(unfinished / "checkpoint")
        torch.save(policy.state_dict(), unfinished / "policy.pt")
        unfinished.rename(made)
    with no_init_weights():
        policy = build_policy(size, folder)
    policy.load_state_dict(torch.load(made / "policy.pt", weights_only=True, mmap=True), assign=True)
    return policy, made / "checkpoint"


def write_whole(value: object, path: Path) -> None:
    unfinished = path.with_suffix(".tmp")
    torch.save(value, unfinished)
    os.replace(unfinished, path)


def prepare(handling: Handling, source: Source, size: Size, batch_size: int) -> Workload:
    noise, time = draw_noise_and_time(handling.student, batch_size, source.device)
    return Workload(
        make_batch(size, batch_size, source.device),
        noise,
        time,
        torch.autocast(source.device.type, torch.bfloat16, enabled=source.dtype == torch.bfloat16),
        torch.optim.AdamW([p for p in handling.student.parameters() if p.requires_grad], lr=LEARNING_RATE),
    )


def steps_of(handling: Handling, work: Workload, device: torch.device, settings: dict[str, Any]) -> tuple[Answer, Row]:
    """Return the first step's answer, and times, peaks and copied bytes of later steps."""
    answers: list[Answer] = []
    step = partial(training_step, handling, work)

    def first() -> None:
        with work.autocast:
            target = handling.target(observe(handling.student, work.batch), work.noise).float().cpu()
        answers.append(Answer(target, step()))

    found: Row = {"first_step_s": first_step_s(first, device)}
    for _ in range(settings["warmup"] - 1):
        step()
    before = handling.report()
    found |= timed(step, device, max_steps=settings["steps"], max_seconds=settings["seconds_per_cell"])
    report = handling.report()
    if "step_ms" in found:
        found["samples_per_s"] = 1e3 * settings["batch_size"] / found["step_ms"]["median"]
        if before is not None and report is not None:
            found["stall_ms"] = (report.stall_ms - before.stall_ms) / found["step_ms"]["num_steps"]
    peaks = PhasePeaks(device)  # after `timed`, whose peaks it resets
    training_step(handling, work, peaks)
    return answers[0], {
        **found,
        "peak_device_bytes": peaks.peak_bytes,
        "host_rss_bytes": host_rss_bytes(),
        "pinned_by_torch_bytes": pinned_bytes(device),
        "teacher_host_bytes": None if report is None else report.host_bytes,
        "teacher_peak_device_bytes": None if report is None else report.peak_device_bytes,
        "teacher_predicted_device_bytes": None if report is None else report.predicted_device_bytes,
        "traffic_bytes": traffic(handling, work, device),
    }


def training_step(handling: Handling, work: Workload, peaks: PhasePeaks = UNOBSERVED) -> float:
    """Take an optimizer step in the order of lerobot's training loop, which also waits for the loss."""
    peaks.start()
    with work.autocast:
        loss = handling.loss(work.batch, work.noise, work.time, peaks)
        value = loss.item()
    loss.backward()
    peaks.mark("backward")
    nn.utils.clip_grad_norm_(handling.student.parameters(), MAX_GRAD_NORM)
    work.optimizer.step()
    work.optimizer.zero_grad()
    peaks.mark("optimizer")
    handling.student.update()
    return value


def traffic(handling: Handling, work: Workload, device: torch.device) -> dict[str, dict[str, int]]:
    """Return bytes over the host link in one step: by CUDA's trace, by the copier, and as known beforehand."""
    step = partial(training_step, handling, work)
    before = handling.report()
    found: dict[str, dict[str, int]] = {}
    if device.type == "cuda":
        try:
            found["profiler"] = copied_bytes(step)
        except NoDeviceActivityError as error:  # in many containers; the copier's own count remains
            print(error, flush=True)
    else:
        step()
    after = handling.report()
    if before is not None and after is not None:
        found["copier"] = {
            "host_to_device": after.bytes_host_to_device - before.bytes_host_to_device,
            "device_to_host": after.bytes_device_to_host - before.bytes_device_to_host,
        }
    if handling.moved_bytes is not None:
        found["computed"] = {"host_to_device": handling.moved_bytes, "device_to_host": handling.moved_bytes}
    return found


def compare(answer: Answer, reference: Answer | None) -> Row:
    if reference is None:
        return {"loss": answer.loss}
    return {
        "loss": answer.loss,
        "loss_equal": answer.loss == reference.loss,
        "loss_difference": abs(answer.loss - reference.loss),
        "target_equal": torch.equal(answer.target, reference.target),
        "target_max_difference": (answer.target - reference.target).abs().max().item(),
    }


REPORT = Report(TARGETS, print_report, is_ours=lambda row: row["mode"] not in OTHER_LIBRARIES)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    shared = {name: getattr(options, name) for name in ("size", "warmup", "steps", "seconds_per_cell")}
    for mode in (mode for mode in (*MODES, AGAIN) if mode in options.modes):
        for dtype in options.dtypes:
            for batch_size in options.batch_sizes:
                what = {"mode": mode, "dtype": dtype, "batch_size": batch_size}
                needs = (OTHER_LIBRARIES[mode],) if mode in OTHER_LIBRARIES else ()
                yield Cell("teacher.offload", f"{mode}, {dtype}, batch {batch_size}", {**what, **shared}, needs)


def main(arguments: list[str] | None = None) -> int:
    device = current_device()
    on_cpu = device.type == "cpu"
    parser = BenchmarkParser(__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="toy" if on_cpu else "real", help="which SmolVLA (here: %(default)s)")
    add("--modes", nargs="+", choices=[*MODES, AGAIN], default=[*MODES, AGAIN], help="default: all")
    add("--batch-sizes", nargs="+", type=int, default=[8] if on_cpu else [1, 8, 32, 64], help="here: %(default)s")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the teacher's weights; default: both")
    add("--warmup", type=int, default=2, help="untimed steps of each cell, at least 1 (default: %(default)s)")
    add("--steps", type=int, default=20, help="timed steps of each cell, at most (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=2.0, help="stop timing a cell after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=510.0, help="of the whole run (default: %(default)s)")
    options = parser.options(arguments)
    output = options.output or results_path(f"teacher-offload-{options.size}", device)
    return run_cells("teacher.offload", list(cells(options)), output, time_limit_s=options.time_limit_s)


if __name__ == "__main__":
    sys.exit(main())
