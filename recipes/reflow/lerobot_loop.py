"""lerobot's training loop in 0.6.1, and on its main branch (0.6.2): no other module knows the difference.

0.6.1 takes an accelerator from outside and does not accumulate. 0.6.2 makes its own accelerator from `--accelerator.…`,
and accumulates by itself. Windows, which a run must not be cut within, and the log of memory are the same in both.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from lerobot.common import train_utils
from lerobot.configs.train import TrainPipelineConfig
from lerobot.scripts import lerobot_train
from lerobot.utils.constants import TRAINING_STATE_DIR
from torch import Tensor

from hf_memopt.lerobot.reflow.reflow_policy import ReflowPolicy
from hf_memopt.memory.device_counters import Host
from hf_memopt.memory.logger import METRICS_FILE, append_metrics
from hf_memopt.ranges import COUNT
from hf_memopt.training.finite_check import FiniteCheck
from hf_memopt.units import GIB

LOOP_ACCUMULATES = find_spec("lerobot.configs.accelerator") is not None
# The recipe's flag, and Accelerate's variable for it.
ACCUMULATION_FLAG = "gradient_accumulation_steps"
ACCUMULATION_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"

AfterBackward = Callable[[Accelerator, int], None]


class AccumulatingAccelerator(Accelerator):
    """Accumulates in the loop of 0.6.1: one forward, backward and step per batch.

    The loop calls `backward` once per batch, so that is where the window advances; between windows' ends, Accelerate's
    optimizer ignores `step` and `zero_grad`. Under DDP every backward reduces the gradients, which is exact, and costs
    traffic only.
    """

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self._do_sync()  # whether this batch ends a window, as `accumulate` would decide at its start
        super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        if self.sync_gradients:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        # A partial sum must not be clipped; lerobot logs its norm all the same.
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)


def make_accelerator(dtype: str, device: str | None, num_accumulation_steps: int) -> Accelerator:
    """Return an Accelerator as the loop uses it, with windows that run across the ends of epochs."""
    kind = Accelerator if LOOP_ACCUMULATES else AccumulatingAccelerator
    return kind(
        step_scheduler_with_optimizer=False,
        # None leaves it to `accelerate launch --mixed_precision`.
        mixed_precision="bf16" if dtype == "bfloat16" else None,
        cpu=device == "cpu",
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=num_accumulation_steps, sync_with_dataloader=False
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )


def settle_accumulation(cfg: TrainPipelineConfig, asked: int) -> int:
    """Return how many batches make an update, 1 in `asked` leaving it to lerobot's flag, and write it to `cfg`."""
    COUNT.check(ACCUMULATION_FLAG, asked)
    if not LOOP_ACCUMULATES:
        return asked
    settings = cfg.accelerator.gradient_accumulation
    if asked > 1 and settings.steps not in (1, asked):
        raise ValueError(
            f"{ACCUMULATION_FLAG}={asked} and accelerator.gradient_accumulation.steps={settings.steps} differ; pass one"
        )
    settings.steps = max(asked, settings.steps)
    return int(settings.steps)


def train(cfg: TrainPipelineConfig, num_accumulation_steps: int, after_backward: AfterBackward) -> None:
    """Run lerobot's loop; `after_backward` gets the accelerator and the number of the batch after each backward."""
    begun = resumed_step(cfg)
    if not LOOP_ACCUMULATES:
        accelerator = make_accelerator(cfg.policy.dtype, cfg.policy.device, num_accumulation_steps)
        lerobot_train.train(cfg, accelerator=_observed(accelerator, after_backward, begun))
        return
    # It has been read, and lerobot wants nothing of its accelerator to be set from outside.
    os.environ.pop(ACCUMULATION_VARIABLE, None)
    make = lerobot_train.make_accelerator
    with patch.object(lerobot_train, "make_accelerator", lambda cfg: _observed(make(cfg), after_backward, begun)):
        lerobot_train.train(cfg)


def resumed_step(cfg: TrainPipelineConfig) -> int:
    """Return the number of batches before this run."""
    if not cfg.resume:
        return 0
    folder = cfg.checkpoint_path / TRAINING_STATE_DIR
    if LOOP_ACCUMULATES:
        return int(train_utils.load_training_metadata(folder)["step"])
    return int(train_utils.load_training_step(folder))


def _observed(accelerator: Accelerator, after_backward: AfterBackward, num_batches: int) -> Accelerator:
    """Return it with a backward pass that also checks its batch, the first one after `num_batches`, and calls on."""
    backward = accelerator.backward
    check: FiniteCheck | None = None

    def observed(loss: Tensor, **kwargs: Any) -> None:
        nonlocal check, num_batches
        if check is None:  # now that lerobot has prepared the policy
            check = FiniteCheck(accelerator, accelerator._models[0], accelerator._optimizers[0], lambda: num_batches)
        num_batches += 1
        backward(loss, **kwargs)
        check.end_micro_batch(loss)
        check.before_update()
        after_backward(accelerator, num_batches)

    accelerator.backward = observed
    return accelerator


def memory_log(cfg: TrainPipelineConfig) -> AfterBackward:
    """Return a function that writes memory by phase into the run's folder whenever lerobot logs.

    It is for `hf-memopt report`, at the end of each backward pass; the optimizer's figure is that of the batch before.
    """
    file, host = Path(cfg.output_dir) / METRICS_FILE, Host()

    def after_backward(accelerator: Accelerator, num_batches: int) -> None:
        if not accelerator.is_main_process or cfg.log_freq <= 0 or num_batches % cfg.log_freq:
            return
        for policy in map(accelerator.unwrap_model, accelerator._models):
            if isinstance(policy, ReflowPolicy):
                figures = policy.memory_figures()
                metrics = {**figures, "memory/host_rss_gib": host.rss_bytes() / GIB}
                device_peaks = [gib for name, gib in figures.items() if name.endswith("_peak_gib")]
                if device_peaks:
                    metrics["memory/peak_allocated_gib"] = max(device_peaks)
                append_metrics(file, num_batches, metrics)

    return after_backward


def check_windows(cfg: TrainPipelineConfig, num_accumulation_steps: int) -> None:
    """Refuse a run that would start, end or be saved in the middle of an accumulation window."""
    for name in ("steps", "save_freq"):
        value = getattr(cfg, name)
        happens = name == "steps" or 0 < value < cfg.steps
        if happens and value % num_accumulation_steps:
            nearest = value + num_accumulation_steps - value % num_accumulation_steps
            raise ValueError(
                f"{name}={value} counts batches and is not a multiple of {ACCUMULATION_FLAG}={num_accumulation_steps}; "
                f"use --{name}={nearest}"
            )
    resumed = resumed_step(cfg)
    if resumed % num_accumulation_steps:
        raise ValueError(
            f"resumed at step {resumed}, in the middle of a window of {ACCUMULATION_FLAG}={num_accumulation_steps}; "
            f"pass the --{ACCUMULATION_FLAG} that the run was started with"
        )
