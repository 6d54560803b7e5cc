"""Figures about memory and time in a run's folder, and the success and speed of its policies in one line."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_memopt.memory.logger import METRICS_FILE, read_metrics
from hf_memopt.report.offloading import OFFLOADING_FILE, OffloadingRecord

DEVICE_PEAK = "memory/peak_allocated_gib"
RESULTS_FILE = "results.json"
COMPARISON_FILE = "comparison.json"
TRAINER_FILE = "trainer_state.json"

_FACTS = ("device", "mode", "loop", "mixed_precision", "num_processes", "corpus", "seed")
# The run's own log, or that of the student's training within the demo.
_METRICS_PLACES = (METRICS_FILE, f"student/{METRICS_FILE}")
_OOM_REPORTS = "out_of_memory_rank*.txt"
# They mark a folder as a run's.
_RUN_FILES = (
    RESULTS_FILE,
    COMPARISON_FILE,
    *_METRICS_PLACES,
    OFFLOADING_FILE,
    TRAINER_FILE,
    f"checkpoint-*/{TRAINER_FILE}",
    _OOM_REPORTS,
)
# The recipes' figures of a model's output.
_STRIPS = ("sampled_paths", "panels")
# Losses of a history that are shown; the VAE-GAN's have no sum that falls.
_LOSSES = {"training": "loss", "held out": "eval_loss", "reconstruction (L1)": "l1"}
# Counters in a record of a recipe's or a Trainer's history; the first present is used. A Trainer's has epochs, too.
_COUNTERS = ("update", "step", "epoch")
# Phases and series of logged steps that differ by a smaller share of the largest value say nothing in a figure.
_EQUAL, _STEADY = 0.05, 0.15
_NO_TIMELINE = (
    f"memory over time and peaks by phase: there is no {METRICS_FILE}, and no {TRAINER_FILE} with memory figures. "
    "Train with callbacks=[MemoryLoggingCallback()] and save a checkpoint, with lerobot's loop for more steps than its "
    "--log_freq, or call append_metrics in your own loop"
)
_NO_PHASES = 'peaks by phase: the logged figures name no phase. Use `with memory.phase("forward"):` and so on'
_COMPARE = "hf-memopt compare RECIPE --modes off,all,auto with the run's own flags"
_NO_MODES = (
    f"memory and time of compared modes: there is no {COMPARISON_FILE}, and no {RESULTS_FILE} with 'training_cost', as "
    f"train_causal_lm writes it. Run {_COMPARE}"
)
_ONE_MODE = f"a comparison: the run has one mode only. Run {_COMPARE}"
_NO_TIME = f"time of each design: 'memory_bytes' in {RESULTS_FILE} counts bytes only"


@dataclass(frozen=True)
class Outcome:
    """One policy's result: Euler steps and median time for an action chunk, and its share of successful tries."""

    num_steps: int
    success_rate: float | None  # None without any try
    latency_ms: float


def outcome_line(outcomes: Mapping[str, Outcome]) -> str:
    """Return "teacher: 94 % in 10 steps, 31 ms; student: 92 % in 1 step, 6 ms", without the rates that are unknown."""
    return "; ".join(f"{name}: {_describe(outcome)}" for name, outcome in outcomes.items())


def gain_line(outcomes: Mapping[str, Outcome]) -> str | None:
    """Return a sentence on the speed and success of student and teacher, or None without both."""
    if not {"teacher", "student"} <= outcomes.keys():
        return None
    teacher, student = outcomes["teacher"], outcomes["student"]
    speed = f"An action chunk takes the student {student.latency_ms / teacher.latency_ms:.0%} of the teacher's time"
    if not teacher.success_rate or student.success_rate is None:
        return f"{speed}."
    return f"{speed}, and it succeeds {student.success_rate / teacher.success_rate:.0%} as often."


def steps_text(num_steps: int) -> str:
    return "1 step" if num_steps == 1 else f"{num_steps} steps"


def _describe(outcome: Outcome) -> str:
    success = "" if outcome.success_rate is None else f"{100 * outcome.success_rate:.0f} % in "
    return f"{success}{steps_text(outcome.num_steps)}, {outcome.latency_ms:.0f} ms"


@dataclass(frozen=True)
class LoggedPeak:
    """Bounds of the highest memory in a phase, equal where exact; without counters, host memory at the phase's ends."""

    name: str
    at_least_gib: float
    at_most_gib: float


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder; missing ones are empty.

    Attributes:
        name: name of the folder.
        facts: about the run, for the page's head.
        modes: memory and time of each compared mode, the reference first; fields of the recipes' `RunCost`.
        holders: bytes on the device by design, phase of a step, and their use.
        outcomes: success and speed of each policy, by its name.
        policies: error, latency and success by policy and number of Euler steps.
        losses: (step, loss) by the model that was trained or evaluated.
        losses_by: the unit of these steps: "update", "epoch" or "step".
        offloading: the work of a Trainer's offloader, if it was attached.
        timeline: memory figures of logged steps, with keys as in `hf_memopt.memory.memory_metrics`.
        oom_reports: text of out-of-memory reports by file name.
        figures: PNG files that the run drew itself.
        missing: figures that the folder lacks, and how to get them.
    """

    name: str
    facts: dict[str, str]
    modes: list[dict[str, Any]]
    holders: dict[str, dict[str, dict[str, int]]]
    outcomes: dict[str, Outcome]
    policies: list[dict[str, Any]]
    losses: dict[str, list[tuple[float, float]]]
    losses_by: str
    offloading: OffloadingRecord | None
    timeline: list[dict[str, float]]
    oom_reports: dict[str, str]
    figures: list[Path]
    missing: list[str]

    @property
    def counts_device(self) -> bool:
        """Return whether the timeline has the device's memory, and not the host's alone."""
        return any(DEVICE_PEAK in record for record in self.timeline)

    @property
    def phases(self) -> list[LoggedPeak]:
        """Return peaks by phase, as of the last logged step."""
        return phase_peaks(self.timeline[-1]) if self.timeline else []

    @property
    def device_varies(self) -> bool:
        """Return whether memory of the device changes from one logged step to another by enough to be seen."""
        return any(self.varies(f"memory/{kind}_gib") for kind in ("allocated", "fragmentation", "elsewhere"))

    def varies(self, key: str) -> bool:
        values = [record[key] for record in self.timeline if key in record]
        return bool(values) and max(values) - min(values) > _STEADY * max(values)

    @property
    def phases_differ(self) -> bool:
        """Return whether some phase's memory is another than the others', by enough to be seen."""
        bounds = [bound for phase in self.phases for bound in (phase.at_least_gib, phase.at_most_gib)]
        return bool(bounds) and max(bounds) - min(bounds) > _EQUAL * max(bounds)

    @property
    def phases_are_exact(self) -> bool:
        """Return whether each phase's peak is one figure and not a range."""
        return all(phase.at_least_gib == phase.at_most_gib for phase in self.phases)

    @property
    def strip(self) -> Path | None:
        """Return the figure in which the run shows its model's output, if it drew one."""
        return next((file for name in _STRIPS for file in self.figures if file.stem == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the contents for JSON, with the figures' names."""
        return {
            **asdict(self),
            "phases": [asdict(phase) for phase in self.phases],
            "figures": [file.name for file in self.figures],
        }


def run_folders(folder: Path, depth: int = 3) -> list[Path]:
    """Return the folder if it holds a run, and otherwise those below it that do, up to `depth` levels down."""
    if any(next(folder.glob(name), None) for name in _RUN_FILES):
        return [folder]
    if depth == 0 or not folder.is_dir():
        return []
    below = sorted(each for each in folder.iterdir() if each.is_dir())
    return [run for each in below for run in run_folders(each, depth - 1)]


def read_run(folder: Path) -> Run:
    """Read a folder that a recipe, the demo or a Trainer with `MemoryLoggingCallback` wrote.

    Raises:
        ValueError: no such folder, nothing in it that can be reported, or a file that cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"run_dir={str(folder)!r} is not a folder; name the output folder of a run")
    results, comparison = (_read_json(folder / name) for name in (RESULTS_FILE, COMPARISON_FILE))
    modes, holders = _modes(results, comparison, folder), _holders(results, folder)
    timeline = _timeline(folder)
    offloading = OffloadingRecord.read(folder / OFFLOADING_FILE) if (folder / OFFLOADING_FILE).exists() else None
    losses, losses_by = _losses(results, folder)
    oom_reports = {file.name: file.read_text() for file in sorted(folder.glob(_OOM_REPORTS))}
    if not (modes or holders or timeline or offloading or oom_reports):
        raise ValueError(f"{folder} holds nothing to report. It lacks {_NO_TIMELINE}. It lacks {_NO_MODES}.")
    return Run(
        name=folder.resolve().name,
        facts=_facts(results or comparison, folder) | (offloading.facts if offloading else {}),
        modes=modes,
        holders=holders,
        outcomes=_outcomes(results, folder),
        policies=_policies(results, folder),
        losses=losses,
        losses_by=losses_by,
        offloading=offloading,
        timeline=timeline,
        oom_reports=oom_reports,
        figures=sorted([*folder.glob("*.png"), *folder.glob("figures/*.png")]),
        missing=_missing(modes, holders, timeline, offloading),
    )


def phase_peaks(record: Mapping[str, float]) -> list[LoggedPeak]:
    peaks = []
    for key, figure in record.items():
        if found := re.fullmatch(r"memory/(.+)_(?:peak|host_rss)_gib", key):
            peaks.append(LoggedPeak(found[1], figure, figure))
        elif found := re.fullmatch(r"memory/(.+)_peak_at_most_gib", key):
            peaks.append(LoggedPeak(found[1], record.get(f"memory/{found[1]}_peak_at_least_gib", 0.0), figure))
    return peaks


def memory_column(modes: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the memory that modes are compared by, and its name: the device's whole peak where it was measured."""
    if any(mode.get("peak_mib") is not None for mode in modes):
        return "peak_mib", "Peak of the device's memory"
    return "saved_mib", "Saved activations on the device at the peak"


def _missing(
    modes: list[Any], holders: Mapping[str, Any], timeline: list[Any], offloading: OffloadingRecord | None
) -> list[str]:
    missing = [] if timeline else [_NO_TIMELINE]
    if timeline and not phase_peaks(timeline[-1]):
        missing.append(_NO_PHASES)
    if holders and not modes:
        missing.append(_NO_TIME)
    elif not modes and offloading is None:  # of a script, for which there is no recipe to compare
        missing.append(_NO_MODES)
    elif len(modes) == 1:
        missing.append(_ONE_MODE)
    return missing


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); run the recipe again, or remove the file") from error
    if not isinstance(found, dict):
        raise _malformed(file, "whole", "an object")
    return found


def _malformed(file: Path, field: str, form: str) -> ValueError:
    return ValueError(f"{file}: its {field} is not {form}; this is not what a recipe of hf_memopt writes")


def _facts(results: Mapping[str, Any], folder: Path) -> dict[str, str]:
    versions = results.get("versions") or {}
    if not isinstance(versions, dict):
        raise _malformed(folder / RESULTS_FILE, "versions", "an object")
    facts = {name.replace("_", " "): str(results[name]) for name in _FACTS if name in results}
    return facts | {"versions": ", ".join(f"{name} {found}" for name, found in versions.items())} if versions else facts


def _modes(results: Mapping[str, Any], comparison: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    # That of the training where none were compared.
    file, field, modes = COMPARISON_FILE, "modes", comparison.get("modes")
    if not comparison:
        file, field = RESULTS_FILE, "training_cost"
        modes = [results[field]] if field in results else []
    if not isinstance(modes, list) or not all(_is_mode(mode) for mode in modes):
        form = "made of objects with mode, step_ms above 0, and other figures that are numbers or null"
        raise _malformed(folder / file, field, form)
    return modes


def _is_mode(mode: Any) -> bool:
    if not isinstance(mode, dict) or not {"mode", "step_ms"} <= mode.keys():
        return False
    figures = [mode[key] for key in mode if key.endswith(("_ms", "_mib")) and mode[key] is not None]
    if not all(isinstance(figure, int | float) for figure in figures):
        return False
    return mode["step_ms"] > 0 if mode["step_ms"] is not None else isinstance(mode.get("failure"), str)


def _holders(results: Mapping[str, Any], folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    found = results.get("memory_bytes", {})
    holders: dict[str, dict[str, dict[str, int]]] = {} if isinstance(found, list) else found  # train_lgt's, by epoch
    try:
        phases = [tuple(by_phase) for by_phase in holders.values()]
        counted = all(isinstance(n, int) for by in holders.values() for kinds in by.values() for n in kinds.values())
    except (AttributeError, TypeError):
        counted = False
    if not counted or len(set(phases)) > 1 or not all(phases):
        raise _malformed(folder / RESULTS_FILE, "memory_bytes", "bytes by design, phase (the same in each) and kind")
    return holders


def _outcomes(results: Mapping[str, Any], folder: Path) -> dict[str, Outcome]:
    try:
        outcomes = {name: Outcome(**found) for name, found in results.get("outcomes", {}).items()}
        outcome_line(outcomes)  # fails for what is no number
    except (AttributeError, TypeError, ValueError) as error:
        form = "num_steps, success_rate and latency_ms by policy"
        raise _malformed(folder / RESULTS_FILE, "outcomes", form) from error
    return outcomes


def _policies(results: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    evaluation = results.get("evaluation", {})
    try:
        return [
            {
                "policy": name,
                "num_steps": int(steps),
                "error": error,
                "latency_ms": found["latency_ms"].get(steps),
                "success_rate": found.get("success_rate", {}).get(steps),
            }
            for name, found in evaluation.items()
            if isinstance(found, dict)
            for steps, error in found["error"].items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        form = "error and latency_ms by policy and number of steps"
        raise _malformed(folder / RESULTS_FILE, "evaluation", form) from error


def _timeline(folder: Path) -> list[dict[str, float]]:
    metrics = next((folder / place for place in _METRICS_PLACES if (folder / place).exists()), None)
    records = _trainer_history(folder) if metrics is None else read_metrics(metrics)
    timeline = [record for record in records if "memory/host_rss_gib" in record]
    for record in timeline:
        if not all(isinstance(record.get(key), int | float) for key in record if key.startswith(("memory/", "step"))):
            raise ValueError(
                f"{folder}: a memory figure of step {record.get('step')} is not a number; remove that record"
            )
    return timeline


def _losses(results: Mapping[str, Any], folder: Path) -> tuple[dict[str, list[tuple[float, float]]], str]:
    """Return the curves that have more than one point, and the unit of their steps."""
    curves, unit = results.get("learning_curves"), "step"
    try:
        if curves is not None:
            return {name: [(float(step), float(loss)) for step, loss in curve] for name, curve in curves.items()}, unit
        history = results.get("history") or _trainer_history(folder)
        unit = next((name for name in _COUNTERS for record in history if name in record), unit)
        read = {name: _curve(history, unit, key) for name, key in _LOSSES.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise _malformed(folder / RESULTS_FILE, "learning_curves or history", "made of steps and losses") from error
    return {name: curve for name, curve in read.items() if len(curve) > 1}, unit


def _curve(history: Sequence[Mapping[str, Any]], unit: str, key: str) -> list[tuple[float, float]]:
    found = [(record.get(unit), record.get(key)) for record in history]
    return [(float(step), float(loss)) for step, loss in found if step is not None and loss is not None]


def _trainer_history(folder: Path) -> list[dict[str, Any]]:
    states = [folder / TRAINER_FILE, *sorted(folder.glob(f"checkpoint-*/{TRAINER_FILE}"), key=_num_steps, reverse=True)]
    newest = next((state for state in states if state.exists()), None)
    history = _read_json(newest).get("log_history", []) if newest else []
    if newest and not (isinstance(history, list) and all(isinstance(record, dict) for record in history)):
        raise _malformed(newest, "log_history", "a list of objects")
    return history


def _num_steps(state: Path) -> int:
    digits = state.parent.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdigit() else -1
