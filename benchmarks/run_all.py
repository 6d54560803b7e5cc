"""Every benchmark that needs a GPU, the most valuable first, each in a process of its own.

    python -m benchmarks.run_all --minutes 60

A job begins only while its whole time limit is left. Each one that ends leaves `NAME.json` in the output folder, with
its log in `logs/`; the next call skips it, so the run can be cut into calls of a few minutes. `--dry-run` runs all
jobs, and the benchmarks that need no GPU, at toy size on the device at hand. The exit status is 1 if a job has failed.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.cells import facts, preload
from benchmarks.common import print_table, write_results

ROOT = Path(__file__).resolve().parents[1]
LAST_LINES = 15  # of a failed job's log
SPARE_S = 40  # of its limit, for a benchmark's imports and report

# Settings of `hf-memopt compare` for each recipe, on a GPU and at toy size.
COPIES = "--cpu_copies --offload_threshold_mb 0.001 --steps 4"
DARCY = "--cache_folder {folder}/data --solve_resolution 0 --num_test 1 --test_resolutions 16 --output_dir {folder}"
DARCY_512 = f"{DARCY} --resolution 512 --num_train 32 --batch_size 16 --train_loss l2 --budget_gib 2.7"
CHECKPOINTED = "--checkpoint_blocks true --checkpoint_mlps true"
DARCY_TOY = f"{DARCY} --num_train 8 --batch_size 4 --hidden_channels 4"
LGT_240 = (
    "--training.batch_size 240 --training.accumulation_steps 1 --training.ode_integration_steps 10"
    " --training.use_amp true --checkpoint.save_dir {folder}"
)
LGT_TOY = (
    "--model.base_channels 8 --model.style_dim 8 --model.time_dim 8 --data.latent_size 8 --data.num_generated 16"
    " --training.batch_size 2 --training.ode_integration_steps 1 --loss.num_projections 4"
    " --checkpoint.save_dir {folder}"
)
IMAGES_512 = (
    "--resolution 512 --channels 64 128 256 256 --discriminator_channels 64 --discriminator_layers 4 --num_drawn 16"
    " --batch_size 3 --r1_interval 1 --lpips_weights random --output_dir {folder}"
)
IMAGES_TOY = (
    "--resolution 16 --channels 8 8 --discriminator_channels 4 --discriminator_layers 1 --num_drawn 8 --batch_size 2"
    " --lpips_weight 0 --output_dir {folder}"
)
WITHOUT_AIDS = "--lpips_gradient plain --decode twice --freeze_discriminator false"

# Modules that measure cell by cell and end by themselves at a time limit.
LIMITED = (
    "benchmarks.activations.offload",
    "benchmarks.activations.longest",
    "benchmarks.teacher.offload",
    "benchmarks.streamed_weights",
    "benchmarks.planning.estimate",
    "benchmarks.planning.cache_clearing",
)


@dataclass(frozen=True)
class Job:
    """One process: a module with its arguments, in which `{folder}` stands for a folder of the job's own."""

    name: str
    minutes: float  # time limit
    real: str | None  # arguments of `python -m` on a GPU; None for a benchmark that needs none
    toy: str | None = None  # the same at toy size; None if another job rehearses the module
    results: str = "results.json"  # file in `{folder}` that the module writes

    def command(self, folder: Path, *, toy: bool, estimates: Path | None) -> list[str]:
        words = [word.replace("{folder}", str(folder)) for word in shlex.split((self.toy if toy else self.real) or "")]
        if words[0].startswith("benchmarks."):
            words += ["--output", f"{folder}/results.json"]
        if words[0] in LIMITED:
            words += ["--time-limit-s", f"{60 * self.minutes - SPARE_S:.0f}"]
        if estimates is not None and words[0] == "benchmarks.planning.estimate":
            words += ["--estimates", str(estimates)]
        return [sys.executable, "-m", *words]


def compared(name: str, minutes: float, recipe: str, modes: str, real: str, toy: str | None = None) -> Job:
    command = f"hf_memopt.cli compare {recipe} --modes"
    return Job(
        name, minutes, f"{command} {modes} {real}", toy and f"{command} off,auto {toy} {COPIES}", "comparison.json"
    )


# First the facts and the tests that all figures rest on, then the headlines of each subject, then their details.
# Limits are guesses until the jobs have run on a GPU.
JOBS = (
    Job("probe", 2, "benchmarks.probe", "benchmarks.probe --size toy"),
    Job("tests", 7, "pytest -m gpu tests/gpu -q --durations=15", "pytest -m gpu tests/gpu -q --collect-only"),
    Job(
        "activations-32k",
        7,
        "benchmarks.activations.offload --tokens 32768 --modes none checkpointing 'ours inputs'"
        " 'ours auto 20 %' TRL 'checkpoint offload' save_on_cpu",
        "benchmarks.activations.offload --size toy --layers 8 --tokens 64 --steps 2",
    ),
    Job(
        "teacher-bf16-32",
        7,
        "benchmarks.teacher.offload --dtypes bfloat16 --batch-sizes 32 --modes resident seed swap swap+shared"
        " stream stream+shared diffusers-leaf diffusers-block accelerate",
        "benchmarks.teacher.offload --size toy --dtypes float32 --batch-sizes 2 --warmup 1 --steps 2"
        " --seconds-per-cell 1",
    ),
    Job(
        "lora-streamed",
        7,
        "benchmarks.streamed_weights --tokens 4096",
        "benchmarks.streamed_weights --size toy --tokens 64 --steps 2 --seconds-per-cell 1",
    ),
    Job("estimates-small-models", 6, "benchmarks.planning.estimate --sizes small --recipes"),
    Job(
        "estimates-small-recipes",
        4,
        "benchmarks.planning.estimate --sizes small --models",
        "benchmarks.planning.estimate --sizes toy --models bert",
    ),
    compared("operators", 4, "neural_operator", "off,all,auto", DARCY_512, DARCY_TOY),
    compared("operators-checkpointed", 3, "neural_operator", "off,inputs", f"{CHECKPOINTED} {DARCY_512}"),
    compared("lgt", 4, "lgt", "off,all,auto", LGT_240, LGT_TOY),
    compared("lgt-checkpointed", 3, "lgt", "off,inputs", f"--training.use_gradient_checkpointing true {LGT_240}"),
    compared("fluxflow", 4, "fluxflow", "off,all,auto", IMAGES_512, IMAGES_TOY),
    compared("fluxflow-checkpointed", 4, "fluxflow", "off,auto", f"--checkpoint_vae true {IMAGES_512}"),
    compared("fluxflow-without-aids", 4, "fluxflow", "off,auto", f"{WITHOUT_AIDS} {IMAGES_512}"),
    Job(
        "longest-24",
        8,
        "benchmarks.activations.longest --workloads layers --cards 24",
        "benchmarks.activations.longest --size toy --to-tokens 64 --steps 2 --seconds-per-cell 1",
    ),
    Job("longest-8", 5, "benchmarks.activations.longest --workloads layers --cards 8"),
    Job("activations-8k", 6, "benchmarks.activations.offload --tokens 8192"),
    Job("longest-lora-24", 8, "benchmarks.activations.longest --workloads lora --cards 24"),
    Job(
        "activations-32k-others",
        8,
        "benchmarks.activations.offload --tokens 32768 --modes none 'ours auto 10 %'"
        " 'ours auto 35 %' 'ours auto' 'all above 10 MB' 'none again'",
    ),
    Job("estimates-medium-models", 6, "benchmarks.planning.estimate --sizes medium --recipes"),
    Job("estimates-medium-recipes", 4, "benchmarks.planning.estimate --sizes medium --models"),
    Job("cache-clearing", 3, "benchmarks.planning.cache_clearing --steps 150"),
    Job("longest-12", 6, "benchmarks.activations.longest --workloads layers --cards 12"),
    Job("longest-16", 8, "benchmarks.activations.longest --workloads layers --cards 16"),
    Job("teacher-bf16-8", 7, "benchmarks.teacher.offload --dtypes bfloat16 --batch-sizes 8"),
    Job("teacher-float32", 8, "benchmarks.teacher.offload --dtypes float32 --batch-sizes 8"),
    # On the CPU; only rehearsed here.
    Job("offload-bytes", 3, None, "benchmarks.activations.offload_bytes --size toy"),
    Job("offload-cost", 3, None, "benchmarks.activations.offload_cost --rounds 3 --tensors 20"),
    Job("small-operations", 3, None, "benchmarks.activations.small_operations --rounds 1 --models UNet"),
    Job(
        "gradient-cache",
        3,
        None,
        "benchmarks.gradient_cache --hidden_size 32 --num_layers 1 --num_pairs 8 --micro_batch_size 4 --rounds 2",
    ),
    Job(
        "optimizer-state",
        5,
        None,
        "benchmarks.limit.optimizer_state --size toy --runs 1 --kinds mapped 'ours, file' --folder {folder}/disk",
    ),
    Job(
        "trained-weights",
        5,
        None,
        "benchmarks.limit.trained_weights --size toy --runs 1 --kinds 'all mapped' 'ours, all' --folder {folder}/disk",
    ),
    Job("saved-bytes", 3, None, "benchmarks.teacher.saved_bytes --size toy"),
    Job("total-memory", 5, None, "benchmarks.teacher.total_memory --size toy --batch-sizes 4"),
    Job("techniques", 5, None, "benchmarks.planning.techniques --toy"),
    Job("streamed-weights", 5, None, "benchmarks.planning.streamed_weights --toy --cards rtx4090"),
    Job(
        "memory-over-a-step",
        3,
        None,
        "benchmarks.planning.memory_over_a_step --layers 2 --budget-mib 20 --figure {folder}/step.png",
    ),
)


def run(options: argparse.Namespace, begun: float) -> list[list[str]]:
    """Run the jobs that have no results yet, of a call that has `begun` by `time.time()`; return the final table."""
    preload()
    where = facts(options.output)
    rows = []
    for job in options.jobs:
        file, left_s = options.output / f"{job.name}.json", begun + 60 * options.minutes - time.time()
        if file.exists() and not options.overwrite:
            ended, when = json.loads(file.read_text())["run"], ", in an earlier call"
        elif 60 * job.minutes > left_s:
            ended, when = {"outcome": f"not begun: needs {job.minutes:g} min", "seconds": 0.0}, ""
        else:
            found, ended = measured(job, options)
            write_results({**found, **where, "run": ended}, file)
            when = ""
        rows.append([job.name, ended["outcome"] + when, f"{ended['seconds']:.0f} s"])
        print(f"{time.time() - begun:6.0f} s  {job.name}: {rows[-1][1]}", flush=True)
    return rows


def measured(job: Job, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a job in a process of its own; return the contents of its results file, and its outcome and seconds."""
    log, begun = options.output / "logs" / f"{job.name}.txt", time.time()
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        command = job.command(Path(name), toy=options.dry_run, estimates=options.estimates)
        # Toys are so small that threads would only wait for each other.
        environ = os.environ | ({"OMP_NUM_THREADS": "1"} if options.dry_run else {})
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environ)
        try:
            status = process.wait(60 * job.minutes)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill(process)
        results = Path(name) / job.results
        found = json.loads(results.read_text()) if results.exists() else {}
    if status == 0:
        measurements = [*found.get("cells", []), *found.get("modes", [])]
        failed = sum(bool(each.get("error") or each.get("failure")) for each in measurements)
        outcome = f"done, {failed} of {len(measurements)} measurements without figures" if failed else "done"
    else:
        print(*log.read_text(errors="replace").splitlines()[-LAST_LINES:], sep="\n")
        outcome = f"failed: took over {job.minutes:g} min" if status is None else f"failed: exit status {status}"
    return found, {"name": job.name, "outcome": outcome, "seconds": round(time.time() - begun, 1)}


def kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # ended in between
                child.kill()
        process.kill()
        process.wait()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run_all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="time for all jobs of this call (default: %(default)s)")
    add("--output", type=Path, help="folder of results (default: outputs/benchmarks, or outputs/rehearsal)")
    add("--only", nargs="+", metavar="NAME", help="these jobs alone")
    add("--overwrite", action="store_true", help="run jobs again that have results")
    add("--estimates", type=Path, help="file of planning.estimate --estimate-only, so that the GPU only measures")
    add("--dry-run", action="store_true", help="all jobs at toy size, with or without a GPU")
    options = parser.parse_args(arguments)
    options.jobs = [job for job in JOBS if (job.toy if options.dry_run else job.real) is not None]
    if options.only:
        names = [job.name for job in options.jobs]
        if unknown := [name for name in options.only if name not in names]:
            parser.error(f"--only {unknown[0]}: there is no such job; choose from {', '.join(names)}")
        options.jobs = [job for job in options.jobs if job.name in options.only]
    folder = options.output or Path("outputs", "rehearsal" if options.dry_run else "benchmarks")
    options.output = folder.resolve()
    options.estimates = options.estimates and options.estimates.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not (options.dry_run or torch.accelerator.is_available()):
        print("There is no GPU here; add --dry-run to run all jobs at toy size", file=sys.stderr)
        return 2
    rows = run(options, psutil.Process().create_time())  # imports take time, too
    print_table(["job", "outcome", "time"], rows)
    print("results in", options.output)
    return 1 if any(outcome.startswith("failed") for _, outcome, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
