"""Windows of several batches, which a run must not be cut within, and the log of memory."""

from pathlib import Path

from accelerate import Accelerator
from lerobot.configs.train import TrainPipelineConfig

from hf_memopt.integrations.lerobot.reflow.reflow_policy import ReflowPolicy
from hf_memopt.memory.device_counters import Host
from hf_memopt.memory.metrics_file import METRICS_FILE, append_metrics
from hf_memopt.recipes.reflow.lerobot_loop import ACCUMULATION_FLAG, resumed_step
from hf_memopt.units import GIB


class MemoryLog:
    """Writes memory by phase into the run's folder whenever lerobot logs, for `hf-memopt report`."""

    def __init__(self, cfg: TrainPipelineConfig) -> None:
        self._file = Path(cfg.output_dir) / METRICS_FILE
        self._host = Host()
        self._log_freq = cfg.log_freq
        self._num_batches = resumed_step(cfg)

    def after_backward(self, accelerator: Accelerator) -> None:
        """Write a batch's figures at the end of its backward pass; the optimizer's is that of the batch before.

        Args:
            accelerator: has prepared the policy.
        """
        for model in accelerator._models:
            policy = accelerator.unwrap_model(model)
            if isinstance(policy, ReflowPolicy) and accelerator.is_main_process:
                self._end_batch(policy.memory_figures())

    def _end_batch(self, figures: dict[str, float]) -> None:
        self._num_batches += 1
        if self._log_freq > 0 and self._num_batches % self._log_freq == 0:
            metrics = {**figures, "memory/host_rss_gib": self._host.rss_bytes() / GIB}
            device_peaks = [gib for name, gib in figures.items() if name.endswith("_peak_gib")]
            if device_peaks:
                metrics["memory/peak_allocated_gib"] = max(device_peaks)
            append_metrics(self._file, self._num_batches, metrics)


def check_windows(cfg: TrainPipelineConfig, num_accumulation_steps: int) -> None:
    """Refuse a run that would start, end or be saved in the middle of an accumulation window.

    Raises:
        ValueError: names the field, its value and the nearest one that works.
    """
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
