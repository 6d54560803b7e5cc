"""The home of a run's teacher, found by simulating the run's own batch before its first step."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from lerobot.configs.train import TrainPipelineConfig

from hf_memopt.planning import Row, SettingsPlan, plan
from hf_memopt.planning.cards.gpus import Card
from hf_memopt.planning.simulation.child_process import IsolatedError
from hf_memopt.recipes.common.auto_plan import best_row, card_of
from hf_memopt.recipes.reflow.workload import SmolVLAReflow, why_not_simulated
from hf_memopt.units import format_gib
from hf_memopt.weights.strategies.auto import usable_bytes

logger = logging.getLogger(__name__)


def planned_home(cfg: TrainPipelineConfig, num_accumulation_steps: int, card: str) -> str:
    """Return the `teacher_offload` with which a run is fastest of those that fit `card`, "auto" for this process's."""
    return _home(best_row(_workload(cfg, num_accumulation_steps), card, PartialState()))


def decided_home(cfg: TrainPipelineConfig, num_accumulation_steps: int) -> str:
    """Return the `teacher_offload` of a run: that of its flags, and for "auto" the fastest that fits by simulation.

    Homes are simulated from the fastest on, one after another, until one fits into the card's free memory. Where that
    cannot be said, the answer is "auto", with which a teacher begins on the host and is placed by the memory that two
    optimizer steps leave. Logs one line that says which, and why. No line, and no simulation, where nothing is open:
    the flags name a home or a budget, there is no teacher of its own, or the run is on a CPU.

    Cost: some 20 s of one core at full size for each home that is tried. Before the first backward on a device, since
    the simulation's process is forked.
    """
    policy = cfg.policy
    has_teacher = policy.use_reflow and policy.has_teacher
    is_open = policy.teacher_offload == "auto" and policy.teacher_budget_gib is None
    if not (has_teacher and is_open) or policy.device == "cpu":
        return str(policy.teacher_offload)
    why_not = _why_not_simulated(cfg)
    if why_not is not None:
        return _measured(logging.INFO, why_not)
    card = _room()
    try:
        found = plan(_workload(cfg, num_accumulation_steps), gpu=card, num_workers=1)
    except (ValueError, IsolatedError) as error:
        # The run may go on all the same: it finds faults other than the simulation's itself.
        return _measured(logging.WARNING, str(error).splitlines()[0])
    logger.info("teacher_offload=auto: %s", _reason(found, cfg.batch_size))
    return _home(found.best)


def _why_not_simulated(cfg: TrainPipelineConfig) -> str | None:
    if not torch.cuda.is_available():
        return f"device={cfg.policy.device!r} is no CUDA device, whose rules a simulation follows"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "of several processes only one would be simulated, without the buckets of their gradients"
    if cfg.policy.pretrained_path is None:
        return "no --policy.path names the student"
    if cfg.peft is not None:
        return "a student with adapters is not simulated"
    if not cfg.use_policy_training_preset:
        return "use_policy_training_preset=False: only the policy's own optimizer is simulated"
    return why_not_simulated(cfg.policy)


def _measured(level: int, why: str) -> str:
    logger.log(level, "teacher_offload=auto: to be decided by what the first two optimizer steps leave; %s", why)
    return "auto"


def _room() -> Card:
    """Return this process's card with the memory that others leave of it, less a share for fragmentation."""
    device = torch.device("cuda", torch.cuda.current_device())
    card = card_of(device)
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    # The context of this process has been taken from the free memory, and is counted once more in each plan.
    return replace(card, memory_bytes=usable_bytes(min(total_bytes, free_bytes + card.context_bytes)))


def _workload(cfg: TrainPipelineConfig, num_accumulation_steps: int) -> SmolVLAReflow:
    folder, size = Path(cfg.policy.pretrained_path), cfg.batch_size
    return SmolVLAReflow(cfg.policy, folder, effective_batch=size * num_accumulation_steps, micro_batch=size)


def _home(row: Row) -> str:
    return str(row.settings["teacher_offload"])


def _reason(found: SettingsPlan, batch_size: int) -> str:
    best, card = found.best, found.card
    too_large = [row for row in found.rows if not row.fits]
    others = [f"; {_home(row)} needs {format_gib(row.needed_bytes)}" for row in too_large]
    return (
        f"{_home(best)}, by simulation of a batch of {batch_size}: predicted peak "
        f"{format_gib(best.estimate.peak_bytes)}, needs {format_gib(best.needed_bytes)} of the "
        f"{format_gib(card.memory_bytes)} that {card.name} can give{''.join(others)}"
    )
