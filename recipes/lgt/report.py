"""What a run of `train_lgt.py` gave: the closing checklist, results.json, the model, curves and panels."""

import importlib.util
import json
import logging
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from safetensors.torch import save

from hf_memopt.command_line import check_output_folder
from hf_memopt.recipes.common.cost import Cost, table
from hf_memopt.recipes.common.options import check_resumable
from hf_memopt.recipes.lgt import images
from hf_memopt.recipes.lgt.config import CheckpointConfig, Config
from hf_memopt.recipes.lgt.data import LatentBank, Latents, describe
from hf_memopt.recipes.lgt.model import LatentTransfer
from hf_memopt.recipes.lgt.run import Run
from hf_memopt.units import format_gib

logger = logging.getLogger(__name__)

EARLY_EPOCHS = 10  # in which the loss has to fall
STABLE_MEMORY = {"device": 0.01, "host": 0.05}  # growth after the first epoch; host memory also counts caches and code
STABLE_SSM = 1.1  # from the third quarter of the run to the last
LONG_EPOCH_S = 300.0  # of 50 to 100 batches
ENOUGH_COVERAGE = 0.25

Verdict = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True)
class Check:
    """One line of the closing report."""

    name: str
    verdict: Verdict
    measured: str


def check_folder(checkpoint: CheckpointConfig) -> None:
    """Refuse a folder that holds another run or cannot be written to, and a checkpoint that is not there."""
    output = Path(checkpoint.save_dir)
    check_output_folder("checkpoint.save_dir", output)
    check_resumable(output / "checkpoints", checkpoint.resume_from_checkpoint)
    used = [name for name in ("results.json", "checkpoints/latest") if (output / name).exists()]
    if used and checkpoint.resume_from_checkpoint is None:
        raise ValueError(
            f"checkpoint.save_dir={checkpoint.save_dir!r} already holds {used[0]}; go on with "
            "--checkpoint.resume_from_checkpoint latest, or name another folder"
        )


def settings(config: Config) -> dict[str, Any]:
    """All fields in one dictionary, as trackers take them: numbers and strings."""
    flat = {f"{section}.{name}": value for section, held in config.as_dict().items() for name, value in held.items()}
    return {name: value if isinstance(value, int | float) else str(value) for name, value in flat.items()}


def results(run: Run, cost: Cost, compared: list[Cost], num_positions: int) -> dict[str, Any]:
    """What a finished training run leaves in `results.json`."""
    config, accelerator, history = run.config, run.accelerator, run.progress.history
    device = accelerator.device
    on_cpu = device.type == "cpu"
    return {
        "mode": config.offload.offload,
        "config": config.as_dict(),
        "data": describe(config),
        "device": "cpu" if on_cpu else torch.get_device_module(device).get_device_name(device),
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "versions": {name: version(name) for name in ("torch", "accelerate")},
        "history": history,
        "final": history[-1],
        "memory_bytes": run.memory_bytes,
        "checklist": checklist(config, history, run.memory_bytes, num_positions, on_cpu=on_cpu),
        "training_cost": cost,
        "compared_costs": compared,
    }


def checklist(
    config: Config, history: list[dict[str, float]], memory_bytes: list[int], num_positions: int, *, on_cpu: bool
) -> list[Check]:
    """What the run was to show.

    Args:
        config: of the run.
        history: one entry per epoch.
        memory_bytes: the most that was held up to the end of each epoch since the run was started or resumed.
        num_positions: of a latent, each with a patch around it.
        on_cpu: memory is the host's.
    """
    return [
        Check("training ran without running out of memory", "passed", f"{len(history)} epochs"),
        _memory_is_stable(memory_bytes, "host" if on_cpu else "device"),
        _falls("loss falls over the first epochs", "loss", history[:EARLY_EPOCHS]),
        _falls("style (SWD) falls", "style_swd", history),
        _content_is_stable(history),
        _epoch_time(config, history),
        _coverage(config, num_positions),
        _compilation(config, history),
    ]


def _memory_is_stable(memory_bytes: list[int], where: str) -> Check:
    name = f"{where} memory is stable"
    if len(memory_bytes) < 2:
        return Check(name, "not applicable", "needs two epochs")
    first, last = memory_bytes[0], memory_bytes[-1]
    growth = last / first - 1
    measured = f"at most {format_gib(last)}, {growth:+.1%} since the first epoch"
    return Check(name, "passed" if growth <= STABLE_MEMORY[where] else "failed", measured)


def _falls(name: str, key: str, history: list[dict[str, float]]) -> Check:
    if len(history) < 2:
        return Check(name, "not applicable", "needs two epochs")
    first, last = history[0][key], history[-1][key]
    return Check(name, "passed" if last < first else "failed", f"{first:.4g} to {last:.4g} in {len(history)} epochs")


def _content_is_stable(history: list[dict[str, float]]) -> Check:
    """In the second half: a new model leaves contents as they are, so that the difference has to rise at first."""
    name = "content (SSM) is stable in the second half"
    later = [entry["content_ssm"] for entry in history[len(history) // 2 :]]
    if len(later) < 2:
        return Check(name, "not applicable", f"{later[0]:.4g}; needs three epochs")
    first, last = mean(later[: len(later) // 2]), mean(later[len(later) // 2 :])
    verdict: Verdict = "passed" if last <= STABLE_SSM * first else "failed"
    return Check(name, verdict, f"{first:.4g} to {last:.4g}, means over {len(later) // 2} epochs and the rest")


def _epoch_time(config: Config, history: list[dict[str, float]]) -> Check:
    """The first epoch is left out: it holds allocations, plans and compilation."""
    name = f"an epoch of 50 to 100 batches takes at most {LONG_EPOCH_S:.0f} s"
    later = [entry["seconds"] for entry in history[1:]] or [history[0]["seconds"]]
    seconds = sorted(later)[len(later) // 2]
    num_batches = round(history[0]["num_batches"])
    measured = f"{seconds:.1f} s for {num_batches} batches of {config.training.batch_size}"
    if not 50 <= num_batches <= 100:
        return Check(name, "not applicable", measured)
    return Check(name, "passed" if seconds <= LONG_EPOCH_S else "failed", measured)


def _coverage(config: Config, num_positions: int) -> Check:
    """Patches that one SWD compares, of those that its batch has."""
    training = config.training
    num_samples = training.batch_size * (training.accumulation_steps if training.gradient_cache else 1)
    num_patches = num_samples * num_positions
    share = min(1.0, config.loss.max_samples / num_patches)
    measured = f"{share:.1%} of the {num_patches:,} patches of {num_samples} latents"
    return Check(
        f"SWD compares at least {ENOUGH_COVERAGE:.0%} of the patches",
        "passed" if share >= ENOUGH_COVERAGE else "failed",
        measured,
    )


def _compilation(config: Config, history: list[dict[str, float]]) -> Check:
    name = "the network is compiled"
    if not config.training.use_compile:
        return Check(name, "not applicable", "training.use_compile is false")
    seconds = history[-1]["compile_seconds"]
    return Check(
        name, "passed" if seconds > 0 else "failed", f"{seconds:.1f} s of compilation, within the first epochs"
    )


def checklist_text(checks: list[Check]) -> str:
    """The checklist as a table."""
    width = max(len(check.name) for check in checks)
    return "\n".join(f"{check.verdict:14}  {check.name:{width}}  {check.measured}" for check in checks)


def write(results: dict[str, Any], model: LatentTransfer, bank: LatentBank, held_out: Latents, config: Config) -> None:
    """Model, configuration, `results.json` and, where matplotlib is installed, figures; the log gets the tables."""
    output = Path(config.checkpoint.save_dir)
    output.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    (output / "model.safetensors").write_bytes(save(weights))  # save_file's are for their owner alone to read
    (output / "config.json").write_text(json.dumps(config.as_dict(), indent=2) + "\n")
    (output / "results.json").write_text(json.dumps(results, indent=2, default=asdict) + "\n")
    logger.info(f"\n{checklist_text(results['checklist'])}\n\n{table(results)}")
    if importlib.util.find_spec("matplotlib") is None:
        logger.info("No panels.png: it needs matplotlib, which the extra 'report' installs")
        return
    images.draw_curves(results["history"], output / "curves.png")
    images.draw_panels(model, bank, held_out, config, output / "panels.png")
