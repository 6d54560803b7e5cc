"""The report of `train_lgt.py`: the closing checklist, results.json, curves and panels."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_memopt.recipes.common.results import History, RunCost, can_draw, run_results, table, write_results
from hf_memopt.recipes.lgt import evaluation
from hf_memopt.recipes.lgt.data import describe
from hf_memopt.recipes.lgt.options import Options
from hf_memopt.recipes.lgt.step import Run
from hf_memopt.text_table import align
from hf_memopt.units import format_gib

logger = logging.getLogger(__name__)

STYLE_LEFT = 0.4  # of the held-out distance to the target style, at most
CONTENT_LOST = 0.5  # of the held-out difference to other contents, at most
STABLE_MEMORY = {"device": 0.01, "host": 0.05}  # growth after the first epoch; host memory also counts caches and code
LONG_EPOCH_S = 300.0  # of 50 to 100 batches
ENOUGH_COVERAGE = 0.25


@dataclass(frozen=True)
class Check:
    name: str
    verdict: Literal["passed", "failed", "not applicable"]
    measured: str


def results(run: Run, num_positions: int, cost: RunCost) -> dict[str, Any]:
    options, history = run.options, run.progress.history
    on_cpu = run.accelerator.device.type == "cpu"
    more = {
        "config": options.as_dict(),
        "data": describe(options),
        "final": history[-1],
        "memory_bytes": run.memory_bytes,
        "checklist": checklist(options, history, run.memory_bytes, num_positions, on_cpu=on_cpu),
    }
    return run_results(run, cost, **more)


def checklist(
    options: Options, history: History, memory_bytes: list[int], num_positions: int, *, on_cpu: bool
) -> list[Check]:
    """Return the claims that the run was to show, and whether it did.

    `memory_bytes` is the most held up to the end of each epoch since the run was started or resumed.
    """
    return [
        Check("training ran without running out of memory", "passed", f"{len(history)} epochs"),
        _memory_is_stable(memory_bytes, "host" if on_cpu else "device"),
        _held_out_loss_falls(options, history),
        _held_out_share("held-out style (SWD) is the target's", history[-1], "swd", "swd_untranslated", STYLE_LEFT),
        _held_out_share("held-out content (SSM) is kept", history[-1], "ssm", "ssm_others", CONTENT_LOST),
        _epoch_time(options, history),
        _coverage(options, num_positions),
        _compilation(options, history),
    ]


def _judged(name: str, holds: bool | None, measured: str) -> Check:
    return Check(name, "not applicable" if holds is None else "passed" if holds else "failed", measured)


def _memory_is_stable(memory_bytes: list[int], where: str) -> Check:
    name = f"{where} memory is stable"
    if len(memory_bytes) < 2:
        return _judged(name, None, "needs two epochs")
    first, last = memory_bytes[0], memory_bytes[-1]
    growth = last / first - 1
    measured = f"at most {format_gib(last)}, {growth:+.1%} since the first epoch"
    return _judged(name, growth <= STABLE_MEMORY[where], measured)


def _held_out_loss_falls(options: Options, history: History) -> Check:
    """Judge by evaluations: how far a batch in training is from its target's style says which target was drawn."""
    name, weights = "held-out loss falls", options.loss
    found = [weights.w_style * each["swd"] + weights.w_content * each["ssm"] for each in history if "swd" in each]
    if len(found) < 2:
        return _judged(name, None, f"{found[0]:.4g}; needs two evaluations")
    return _judged(name, found[-1] < found[0], f"{found[0]:.4g} to {found[-1]:.4g} in {len(found)} evaluations")


def _held_out_share(name: str, last: dict[str, float], figure: str, of: str, most: float) -> Check:
    if last[of] == 0:
        return _judged(name, None, f"{of} is 0; needs two different held-out latents of each style")
    share = last[figure] / last[of]
    measured = f"{last[figure]:.4g}, {share:.0%} of {of}'s {last[of]:.4g}; at most {most:.0%}"
    return _judged(name, share <= most, measured)


def _epoch_time(options: Options, history: History) -> Check:
    """Leave out the first epoch, which holds allocations, plans and compilation."""
    later = [entry["seconds"] for entry in history[1:]] or [history[0]["seconds"]]
    seconds = sorted(later)[len(later) // 2]
    num_batches = round(history[0]["num_batches"])
    holds = seconds <= LONG_EPOCH_S if 50 <= num_batches <= 100 else None
    measured = f"{seconds:.1f} s for {num_batches} batches of {options.training.batch_size}"
    return _judged(f"an epoch of 50 to 100 batches takes at most {LONG_EPOCH_S:.0f} s", holds, measured)


def _coverage(options: Options, num_positions: int) -> Check:
    training = options.training
    num_samples = training.batch_size * (training.accumulation_steps if training.gradient_cache else 1)
    num_patches = num_samples * num_positions
    share = min(1.0, options.loss.max_samples / num_patches)
    measured = f"{share:.1%} of the {num_patches:,} patches of {num_samples} latents"
    return _judged(f"SWD compares at least {ENOUGH_COVERAGE:.0%} of the patches", share >= ENOUGH_COVERAGE, measured)


def _compilation(options: Options, history: History) -> Check:
    name = "the network is compiled"
    if not options.training.use_compile:
        return _judged(name, None, "training.use_compile is false")
    seconds = history[-1]["compile_seconds"]
    return _judged(name, seconds > 0, f"{seconds:.1f} s of compilation, within the first epochs")


def write(results: dict[str, Any], run: Run, output: Path) -> None:
    options, model = run.options, run.best_model()
    write_results(results, output)
    costs = table([results["training_cost"]], results["device"])
    checks = align([[check.verdict, check.name, check.measured] for check in results["checklist"]])
    logger.info("\n".join(["", *checks, "", costs]))
    if can_draw("panels.png"):
        evaluation.draw_curves(results["history"], output / "curves.png")
        evaluation.draw_panels(model, run.bank, run.held_out, options, output / "panels.png")
