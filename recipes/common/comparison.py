"""Compares the modes of offloading by a recipe's own updates, for `hf-memopt compare`.

Each mode has a process of its own, so that none finds memory that another one left, and one that runs out of memory
leaves the others alone. In that process it begins from the recipe's seed twice: updates are timed and their peak is
counted first; then a few more are recorded, of which all bits have to be those of mode "off", as for `verify`.
"""

import importlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import tqdm
from torch import Tensor

from hf_memopt.command_line import check_output_folder
from hf_memopt.exactness.comparison import compare as verify_recordings
from hf_memopt.exactness.recorder import Recorder
from hf_memopt.exactness.recording import Recording
from hf_memopt.exactness.report import VerifyReport, report_of
from hf_memopt.exactness.runs import Kind, compare_runs, is_in_float32, is_switched
from hf_memopt.planning.workload import PASSES_OF_AUTO
from hf_memopt.process_trees import begin_child
from hf_memopt.recipes.common.loop import Run
from hf_memopt.recipes.common.results import RunCost, environment, mib, table
from hf_memopt.report.runs import COMPARISON_FILE
from hf_memopt.report.tables import differing_modes
from hf_memopt.training.repeatable import deterministic_kernels

# Begins a run from its seed: the run, and the losses of its updates, endlessly.
Begin = Callable[[Any], tuple[Run, Iterator[Tensor]]]

# As many as mode "auto" needs to record, plan, and follow the plan.
NUM_CHECKED = PASSES_OF_AUTO


def compare(name: str, arguments: Sequence[str], modes: Sequence[str], num_steps: int) -> bool:
    """Compare modes, "off" first, and write `comparison.json` into the recipe's output folder.

    The first half of `num_steps` updates warms up. Returns whether inputs, losses, gradients, weights and optimizer
    states of all modes are those of "off", bit for bit, as far as the modes ran.
    """
    if (num_processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(
            f"WORLD_SIZE={num_processes}: modes are compared in one process; use --num_processes 1, or no launcher"
        )
    recipe: Any = importlib.import_module(f"hf_memopt.recipes.{name}")
    options = recipe.parse(recipe.__doc__, arguments, compared=modes)
    folder = Path(options.output_dir)
    check_output_folder("output_dir", folder)
    costs: list[RunCost] = []
    where: dict[str, Any] = {}
    reference: Recording | None = None
    for mode in modes:
        cost, where_it_ran, recording = _in_a_new_process(name, in_mode(options, mode), num_steps)
        costs.append(cost)
        where |= where_it_ran
        if cost is costs[0]:
            reference = recording
            cost.compared = "reference"
        elif reference is not None and recording is not None:
            report = _compared(name, options, (modes[0], mode), reference, recording)
            cost.compared, cost.equal = report.words, report.equal
            if not report.equal:
                print(f"mode {mode}: {report.answer}")
    found = {"recipe": name, **where, "num_steps": num_steps, "modes": [asdict(cost) for cost in costs]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COMPARISON_FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{table(costs, found.get('device', ''))}\nwrote {folder / COMPARISON_FILE}")
    return not differing_modes(found["modes"])


def read_costs(folder: Path) -> list[RunCost]:
    file = folder / COMPARISON_FILE
    return [RunCost(**mode) for mode in json.loads(file.read_text())["modes"]] if file.exists() else []


def in_mode(options: Any, mode: str) -> Any:
    return options._replace(offload=replace(options.offload, offload=mode))


def _in_a_new_process(name: str, options: Any, num_steps: int) -> tuple[RunCost, dict[str, Any], Recording | None]:
    try:
        return _pooled(measure, name, options, num_steps)
    except BrokenProcessPool:
        return RunCost(options.offload.offload, failure="killed, perhaps because host memory ran out"), {}, None


def _pooled[T](function: Callable[..., T], *given: Any) -> T:
    # A forked process would have this one's memory, and could not use an accelerator that this one has used.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=begin_child, initargs=(os.getpid(),)) as pool:
        return pool.submit(function, *given).result()


def _compared(
    name: str, options: Any, modes: tuple[str, str], reference: Recording, recording: Recording
) -> VerifyReport:
    """Compare a mode's recording with the reference, of which more runs are made only if the two differ."""
    comparison = verify_recordings(reference, recording)
    if not comparison.differences:
        return report_of(reference, recording, comparison, [], is_control=False)

    present = {"plain": reference, "switched": recording}

    def record_again(kind: Kind, dtype: str | None) -> Recording:
        mode = in_mode(options, modes[is_switched(kind)])
        return present[kind] if kind in present else _pooled(recorded, name, mode, dtype, is_in_float32(kind))

    return compare_runs(record_again)


def measure(name: str, options: Any, num_steps: int) -> tuple[RunCost, dict[str, Any], Recording | None]:
    recording = None
    try:
        begin = _begin(name, options)
        cost = _timed(begin, options, num_steps)
        recording = _recorded(begin, options)
        if cost.mode == "off":
            cost.saved_mib = _saved(begin, options)
    except torch.OutOfMemoryError:
        cost = RunCost(options.offload.offload, failure="out of memory")
    return cost, environment(Accelerator()), recording


def recorded(name: str, options: Any, perturbed: str | None, in_float32: bool) -> Recording:
    """Record updates of a recipe, as a `Recorder` does with these arguments."""
    return _recorded(_begin(name, options), options, perturbed, in_float32)


def _begin(name: str, options: Any) -> Begin:
    # Required by deterministic kernels, from the first matrix product on.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    recipe: Any = importlib.import_module(f"hf_memopt.recipes.{name}")
    loaded = recipe.load(options)

    def begin(options: Any) -> tuple[Run, Iterator[Tensor]]:
        run = recipe.prepare(recipe.make_accelerator(options), options, *loaded)
        return run, recipe.losses(run)

    return begin


def _timed(begin: Begin, options: Any, num_steps: int) -> RunCost:
    run, updates = begin(options)
    timer = run.timer()
    for step in tqdm(range(num_steps), desc=f"Measuring: {options.offload.offload}", unit="update", leave=False):
        if step == num_steps // 2:  # allocations and the plan of mode "auto" belong to the first half
            timer.restart()
        timer.begin()
        next(updates)
        timer.end()
    run.accelerator.free_memory()
    return timer.cost()


def _recorded(begin: Begin, options: Any, perturbed: str | None = None, in_float32: bool = False) -> Recording:
    recorder = Recorder(perturbed=perturbed, in_float32=in_float32)
    with deterministic_kernels(), recorder:
        run, updates = begin(options)
        for _ in range(NUM_CHECKED):
            next(updates)
            recorder.end_step()
    run.accelerator.free_memory()
    return recorder.recording


def _saved(begin: Begin, options: Any) -> float | None:
    """Return the MiB that an update saves on the device, counted by an offloader that has no room to move anything."""
    keep_all = replace(
        options.offload, offload="all", host_budget_gib=0, cpu_copies=True, disk=None, disk_budget_gib=None
    )
    run, updates = begin(options._replace(offload=keep_all))
    next(updates)
    assert run.offloader is not None
    return mib(run.offloader.stats.measured_peak_gib)
