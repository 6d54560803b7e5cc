"""Distil a SmolVLA policy into a student that needs one Euler step, with the teacher off the GPU.

    hf-memopt prepare-student --teacher <your fine-tuned smolvla> --output outputs/student_init
    accelerate launch recipes/reflow_smolvla.py --policy.path=outputs/student_init --dataset.repo_id=<repo> \\
        --output_dir=outputs/student --batch_size=8 --gradient_accumulation_steps=4 --policy.dtype=bfloat16
    hf-memopt export --policy outputs/student --output outputs/student_1step --num-steps 1

Every flag of `lerobot-train` works and means what it means there; `--help` lists them. Resume with
`--config_path=outputs/student/checkpoints/last/pretrained_model/train_config.json --resume=true`, and pass the same
`--gradient_accumulation_steps` again: lerobot's saved configuration has no place for it.

What this adds to lerobot's own training loop:

- `--gradient_accumulation_steps=N` (here, behind the script's name: `accelerate launch` does not pass its own flag on):
  N batches of `--batch_size` make one optimizer update, with the gradient of one batch N times as large. lerobot's loop
  ignores the setting except for dividing the loss by N. All of lerobot's step counts, the learning-rate schedule
  included, go on counting batches, so `--steps` and `--save_freq` must be multiples of N.
- `--policy.dtype=bfloat16`: autocast in bfloat16.
- `--plan=auto`, or `--plan=8GiB` for another card: where the teacher lives (`--policy.teacher_offload`) is chosen by
  simulation before the run, for the batch that the flags say. `hf-memopt plan` also varies batch and accumulation.
- `--policy.couplings_path=<folder of hf-memopt precompute>`: the teacher's targets from disk, and no teacher.
- memory by phase in each log line, and in the output folder for `hf-memopt report`: `prefix`, `teacher`, `forward`,
  `backward`, `optimizer`, as peak GiB on an accelerator and resident GiB on the CPU, and the GiB that the teacher owns.
"""

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from lerobot.common.train_utils import load_training_step
from lerobot.configs import parser
from lerobot.configs.train import TrainPipelineConfig
from lerobot.scripts.lerobot_train import train
from lerobot.utils.constants import TRAINING_STATE_DIR
from torch import Tensor

from hf_memopt.command_line import one_line_errors
from hf_memopt.integrations.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.integrations.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.integrations.lerobot.training_flags import read_training_flags
from hf_memopt.memory.device_counters import Host
from hf_memopt.memory.metrics_file import METRICS_FILE, append_metrics
from hf_memopt.ranges import COUNT, COUNT_OR_ZERO, NOT_NEGATIVE, SEED
from hf_memopt.recipes.common.auto_plan import card_of
from hf_memopt.recipes.common.flags import check_card
from hf_memopt.tuning import plan
from hf_memopt.tuning.settings_table import explain, headline
from hf_memopt.units import GIB

ACCUMULATION_FLAG = "gradient_accumulation_steps"
PLAN_FLAG = "plan"

logger = logging.getLogger(__name__)


class AccumulatingAccelerator(Accelerator):
    """Accumulates in a loop that was written without accumulation: one forward, backward and step per batch.

    lerobot calls `backward` once per batch, so that is where the window advances; between windows' ends, Accelerate's
    optimizer ignores `step` and `zero_grad`. Under DDP every backward reduces the gradients, which is exact, and costs
    traffic only.
    """

    memory_log: "MemoryLog | None" = None

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self._do_sync()
        super().backward(loss, **kwargs)
        for model in self._models:
            policy = self.unwrap_model(model)
            if isinstance(policy, SmolVLAReflowPolicy) and policy.memory is not None:
                policy.memory.mark("backward")
                if self.memory_log is not None and self.is_main_process:
                    self.memory_log.end_batch(policy.memory.figures())

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        if self.sync_gradients:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        # A partial sum must not be clipped; lerobot logs its norm all the same.
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)


class MemoryLog:
    """Writes memory by phase into the run's folder whenever lerobot logs, for `hf-memopt report`."""

    def __init__(self, cfg: TrainPipelineConfig) -> None:
        self._file = Path(cfg.output_dir) / METRICS_FILE
        self._host = Host()
        self._log_freq = cfg.log_freq
        self._num_batches = load_training_step(cfg.checkpoint_path / TRAINING_STATE_DIR) if cfg.resume else 0

    def end_batch(self, figures: dict[str, float]) -> None:
        """Figures of `PhaseMemory`; the optimizer's is that of the batch before."""
        self._num_batches += 1
        if self._log_freq > 0 and self._num_batches % self._log_freq == 0:
            metrics = {f"memory/{name.replace('_rss_gib', '_host_rss_gib')}": gib for name, gib in figures.items()}
            metrics["memory/host_rss_gib"] = self._host.rss_bytes() / GIB
            device_peaks = [gib for name, gib in figures.items() if name.endswith("_peak_gib")]
            if device_peaks:
                metrics["memory/peak_allocated_gib"] = max(device_peaks)
            append_metrics(self._file, self._num_batches, metrics)


def make_accelerator(cfg: TrainPipelineConfig, num_accumulation_steps: int) -> AccumulatingAccelerator:
    """An Accelerator set up as lerobot's loop sets up its own, with windows that run across the ends of epochs."""
    return AccumulatingAccelerator(
        step_scheduler_with_optimizer=False,
        # None leaves it to `accelerate launch --mixed_precision`.
        mixed_precision="bf16" if cfg.policy.dtype == "bfloat16" else None,
        cpu=cfg.policy.device == "cpu",
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=num_accumulation_steps, sync_with_dataloader=False
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )


def check_windows(cfg: TrainPipelineConfig, num_accumulation_steps: int) -> None:
    """Refuse a run that would start, end or be saved in the middle of an accumulation window.

    Raises:
        ValueError: names the field, its value and the nearest one that works.
    """
    COUNT.check(ACCUMULATION_FLAG, num_accumulation_steps)
    for name in ("steps", "save_freq"):
        value = getattr(cfg, name)
        happens = name == "steps" or 0 < value < cfg.steps
        if happens and value % num_accumulation_steps:
            nearest = value + num_accumulation_steps - value % num_accumulation_steps
            raise ValueError(
                f"{name}={value} counts batches and is no multiple of {ACCUMULATION_FLAG}={num_accumulation_steps}; "
                f"use --{name}={nearest}"
            )
    resumed = load_training_step(cfg.checkpoint_path / TRAINING_STATE_DIR) if cfg.resume else 0
    if resumed % num_accumulation_steps:
        raise ValueError(
            f"resumed at step {resumed}, in the middle of a window of {ACCUMULATION_FLAG}={num_accumulation_steps}; "
            f"pass the --{ACCUMULATION_FLAG} that the run was started with"
        )


def take_accumulation_flag(arguments: list[str]) -> tuple[int, list[str]]:
    """Split the recipe's own flag off the command line; without it, accelerate's environment variable counts."""
    value = parser.parse_arg(ACCUMULATION_FLAG, arguments)
    value = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") if value is None else value
    if not value.isdigit():
        raise ValueError(f"{ACCUMULATION_FLAG}={value!r} is no whole number; pass e.g. --{ACCUMULATION_FLAG}=4")
    return int(value), parser.filter_arg(ACCUMULATION_FLAG, arguments)


def take_plan_flag(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Split the card to plan for off the command line; None without the flag."""
    return parser.parse_arg(PLAN_FLAG, arguments), parser.filter_arg(PLAN_FLAG, arguments)


def planned_offload(cfg: TrainPipelineConfig, num_accumulation_steps: int, card: str) -> str:
    """The `teacher_offload` with which the run is fastest of those that fit a card; each process finds the same.

    Raises:
        ValueError: nothing fits with this batch, `card` is unknown, or the training cannot be simulated.
    """
    from hf_memopt.recipes.reflow.plan import SmolVLAReflow

    workload = SmolVLAReflow(
        cfg.policy,
        Path(cfg.policy.pretrained_path),
        effective_batch=cfg.batch_size * num_accumulation_steps,
        micro_batch=cfg.batch_size,
    )
    found = plan(workload, gpu=card_of(PartialState().device) if card == "auto" else card)
    logger.info("Plan: %s", "\n  ".join([headline(found), *explain(found)]))
    chosen: str = found.best.settings["teacher_offload"]
    return chosen


def check_numbers(cfg: TrainPipelineConfig) -> None:
    """Refuse numbers that lerobot would find out about later, or not at all."""
    for name, allowed in (
        ("steps", COUNT),
        ("batch_size", COUNT),
        ("num_workers", COUNT_OR_ZERO),
        ("log_freq", COUNT_OR_ZERO),
        ("save_freq", COUNT_OR_ZERO),
        ("seed", SEED),
    ):
        allowed.check(name, getattr(cfg, name))
    for name in ("optimizer_lr", "optimizer_weight_decay", "optimizer_grad_clip_norm"):
        NOT_NEGATIVE.check(f"policy.{name}", getattr(cfg.policy, name))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says, or `arguments` in its place."""
    if arguments is not None:
        sys.argv[1:] = arguments
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(__doc__)
    num_accumulation_steps, sys.argv[1:] = take_accumulation_flag(sys.argv[1:])
    card, sys.argv[1:] = take_plan_flag(sys.argv[1:])
    check_card(card)
    cfg = read_training_flags()
    if not isinstance(cfg.policy, SmolVLAReflowConfig):
        kind = None if cfg.policy is None else cfg.policy.type
        raise ValueError(
            f"policy type {kind!r}: this recipe trains smolvla_reflow; make a student with `hf-memopt prepare-student` "
            "and pass it as --policy.path"
        )
    check_numbers(cfg)
    check_windows(cfg, num_accumulation_steps)
    if card is not None:
        cfg.policy.teacher_offload = planned_offload(cfg, num_accumulation_steps, card)
    with warnings.catch_warnings():
        # The schedule counts batches, so it moves before the first update; torch takes that for a mistake.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        accelerator = make_accelerator(cfg, num_accumulation_steps)
        accelerator.memory_log = MemoryLog(cfg)
        train(cfg, accelerator=accelerator)


if __name__ == "__main__":
    sys.exit(one_line_errors("reflow_smolvla", main))
