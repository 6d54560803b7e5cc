"""Accumulation in lerobot's loop, which was written without, and its log of memory."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from lerobot.common.train_utils import load_training_step
from lerobot.configs.train import TrainPipelineConfig
from lerobot.utils.constants import TRAINING_STATE_DIR
from torch import Tensor

from hf_memopt.integrations.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.memory.device_counters import Host
from hf_memopt.memory.metrics_file import METRICS_FILE, append_metrics
from hf_memopt.ranges import COUNT
from hf_memopt.units import GIB

ACCUMULATION_FLAG = "gradient_accumulation_steps"


class AccumulatingAccelerator(Accelerator):
    """Accumulates in a loop that was written without accumulation: one forward, backward and step per batch.

    lerobot calls `backward` once per batch, so that is where the window advances; between windows' ends, Accelerate's
    optimizer ignores `step` and `zero_grad`. Under DDP every backward reduces the gradients, which is exact, and costs
    traffic only.
    """

    memory_log: "MemoryLog | None" = None

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self._do_sync()  # whether this batch ends a window, as `accumulate` would decide at its start
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
        self._num_batches = resumed_step(cfg)

    def end_batch(self, figures: dict[str, float]) -> None:
        """Take figures of `PhaseMemory`; the optimizer's is that of the batch before."""
        self._num_batches += 1
        if self._log_freq > 0 and self._num_batches % self._log_freq == 0:
            metrics = {f"memory/{name.replace('_rss_gib', '_host_rss_gib')}": gib for name, gib in figures.items()}
            metrics["memory/host_rss_gib"] = self._host.rss_bytes() / GIB
            device_peaks = [gib for name, gib in figures.items() if name.endswith("_peak_gib")]
            if device_peaks:
                metrics["memory/peak_allocated_gib"] = max(device_peaks)
            append_metrics(self._file, self._num_batches, metrics)


def make_accelerator(dtype: str, device: str | None, num_accumulation_steps: int) -> AccumulatingAccelerator:
    """Return an Accelerator as lerobot's loop makes its own, with windows that run across the ends of epochs."""
    return AccumulatingAccelerator(
        step_scheduler_with_optimizer=False,
        # None leaves it to `accelerate launch --mixed_precision`.
        mixed_precision="bf16" if dtype == "bfloat16" else None,
        cpu=device == "cpu",
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
    resumed = resumed_step(cfg)
    if resumed % num_accumulation_steps:
        raise ValueError(
            f"resumed at step {resumed}, in the middle of a window of {ACCUMULATION_FLAG}={num_accumulation_steps}; "
            f"pass the --{ACCUMULATION_FLAG} that the run was started with"
        )


def resumed_step(cfg: TrainPipelineConfig) -> int:
    """Return the number of batches before this run; 0 for a new one."""
    return int(load_training_step(cfg.checkpoint_path / TRAINING_STATE_DIR)) if cfg.resume else 0
