"""Commands of lerobot and of this project, run in this process as a shell would in a new one."""

import contextlib
import functools
import io
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerators import forget_accelerator
from draccus.wrappers import docstring
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.scripts.lerobot_train import main as lerobot_train
from safetensors.torch import load_file
from torch import Tensor

from hf_memopt.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.recipes.reflow.smolvla_toy import dataset_flags

# lerobot's command lines look up the comment above each configuration field, in its source, each time.
docstring.get_attribute_docstring = functools.cache(docstring.get_attribute_docstring)

PLUGIN = "--discover_packages_path=hf_memopt.lerobot"
# A constant learning rate, so that runs of any length compare; SGD, as rounding can flip Adam's first signs.
PLAIN_SGD = (
    "--use_policy_training_preset=false",
    "--optimizer.type=sgd",
    "--optimizer.lr=0.02",
    "--optimizer.grad_clip_norm=1",
    "--scheduler.type=constant_with_warmup",
    "--scheduler.num_warmup_steps=0",
)


def run(command: Callable[[], Any], *flags: str) -> str:
    """Run a command that reads `sys.argv`, and return its standard error, with its log."""
    with new_process(flags) as log:
        command()
    return log.getvalue()


def train_flags(
    student: Path, dataset: Path, output: Path, *, steps: int, batch_size: int = 2, device: str = "cpu"
) -> list[str]:
    """Return flags of a short run that logs every step and saves at the end."""
    return [
        f"--policy.path={student}",
        f"--policy.device={device}",
        "--policy.push_to_hub=false",
        *dataset_flags(dataset),
        "--num_workers=0",
        f"--steps={steps}",
        f"--batch_size={batch_size}",
        "--log_freq=1",
        f"--output_dir={output}",
    ]


def train_teacher(vlm_flags: list[str], dataset: Path, output: Path) -> Path:
    """Train a stock SmolVLA for three steps, and return its `pretrained_model` folder."""
    flags = [
        *vlm_flags,
        "--policy.device=cpu",
        *dataset_flags(dataset),
        "--num_workers=0",
        "--batch_size=4",
        "--steps=3",
    ]
    run(lerobot_train, *flags, f"--output_dir={output}")
    return output / "checkpoints" / "last" / "pretrained_model"


def weights(folder: Path) -> dict[str, Tensor]:
    """Return weights of a checkpoint folder, or of a training output's last checkpoint."""
    last = folder / "checkpoints" / "last" / "pretrained_model"
    return load_file((last if last.exists() else folder) / "model.safetensors")


def logged(log: str, figure: str) -> list[float]:
    """Return a log's values of one figure, one for each logged step."""
    words = [word for line in log.splitlines() if " step:" in line for word in line.split()]
    return [float(word.removeprefix(f"{figure}:")) for word in words if word.startswith(f"{figure}:")]


def pin_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make noise and time functions of the frame, to compare runs that visit frames in other groups."""
    for policy in (SmolVLAPolicy, SmolVLAReflowPolicy):
        monkeypatch.setattr(policy, "forward", _with_pinned_draws(policy.forward))


def _with_pinned_draws(forward: Callable[..., Any]) -> Callable[..., Any]:
    def pinned(
        self: SmolVLAPolicy, batch: dict[str, Tensor], noise: Any = None, time: Any = None, **kwargs: Any
    ) -> Any:
        if noise is None:
            shape = (self.config.chunk_size, self.config.max_action_dim)
            generators = [torch.Generator().manual_seed(index) for index in batch["index"].tolist()]
            noise = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
            time = torch.stack([torch.rand((), generator=generator) for generator in generators])
        return forward(self, batch, noise=noise, time=time, **kwargs)

    return pinned


@contextlib.contextmanager
def new_process(flags: tuple[str, ...]) -> Iterator[io.StringIO]:
    """Give a command's process-wide state as a new process has it, and restore it afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    argv, environment = sys.argv, os.environ.copy()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    benchmark, tf32 = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32
    sys.argv = ["command", *flags]
    forget_accelerator()
    try:
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stderr(io.StringIO()) as log:
            yield log
    finally:
        forget_accelerator()
        torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = benchmark, tf32
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
        root.handlers[:] = handlers
        root.setLevel(level)
