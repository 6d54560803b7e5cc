"""`hf-memopt precompute`: all pairs of a reflow run, ahead of it, from the run's flags."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets import LeRobotDataset
from lerobot.datasets.factory import make_dataset
from lerobot.policies import make_policy
from torch import Tensor
from torch.utils.data import default_collate

from hf_memopt.lerobot.couplings.cache import CouplingSpec, precompute
from hf_memopt.lerobot.evaluate.measure import reading_dataset
from hf_memopt.lerobot.files.checkpoint_files import load_processors
from hf_memopt.lerobot.files.policy_files import resolve_checkpoint
from hf_memopt.lerobot.flow.reflow_options import is_student
from hf_memopt.lerobot.reflow.pair_source import comparable_fields, coupling_inputs, solve
from hf_memopt.lerobot.reflow.reflow_policy import ReflowPolicy
from hf_memopt.lerobot.training_flags import read_training_flags


def precompute_for_policy(
    training_flags: Sequence[str],
    output: Path,
    *,
    batch_size: int = 1,
    shard_size: int = 1024,
    store_observations: bool = False,
) -> list[int]:
    """Write the couplings of every frame of a dataset, for `--policy.couplings_path`; return shards not yet written.

    Processes that `accelerate launch` or `torchrun` started share the work; they do not talk to each other. The
    `training_flags` are those of `lerobot-train`, of which `--policy.couplings_seed` (default 0) and
    `--policy.couplings_per_frame` (1) name the couplings. The teacher solves `batch_size` frames together: 1 gives the
    pairs of training online with the same seed, bit for bit. Raises ValueError for flags without a teacher, a folder of
    other couplings, or data that is streamed, or augmented at random without `store_observations`.
    """
    # lerobot reads `sys.argv`, in several places.
    flags = [sys.argv[0], "--discover_packages_path=hf_memopt.lerobot", *training_flags]
    with patch.object(sys, "argv", flags):
        cfg = read_training_flags()
    config = _check(cfg)
    with reading_dataset(cfg.dataset.repo_id, cfg.dataset.root):
        dataset = make_dataset(cfg)
    policy = make_policy(cfg=config, ds_meta=dataset.meta, rename_map=cfg.rename_map).eval()
    indices, load = _frames(cfg, policy, dataset)
    policy.load_teacher_model()
    teacher = resolve_checkpoint(str(config.teacher_model_path))
    key = {
        **comparable_fields(config, dataset.meta.stats, Path(dataset.meta.root), teacher),
        "shared_prefix": policy.teacher.why_not_shared is None,
    }
    shape = (config.chunk_size, config.max_action_dim)
    spec = CouplingSpec(key, indices, shape, config.couplings_per_frame or 1, batch_size)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

    def ask(inputs: Any, noise: Tensor) -> Tensor:
        return solve(policy, inputs, noise.to(config.device)).cpu()

    with _arithmetic_of_training(cfg):
        return precompute(
            ask,
            load,
            spec,
            output,
            shard_size=shard_size,
            store_observations=store_observations,
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
        )


def _frames(
    cfg: TrainPipelineConfig, policy: ReflowPolicy, dataset: LeRobotDataset
) -> tuple[list[int], Callable[[list[int]], dict[str, Tensor]]]:
    """Return the names of a dataset's frames, and how to load some, preprocessed as lerobot's training loop does it."""
    config = policy.config
    indices = [int(index) for index in dataset.hf_dataset["index"]]
    position = {index: position for position, index in enumerate(indices)}
    overrides = {
        "device_processor": {"device": torch.device(config.device).type},
        "normalizer_processor": {
            "features": {**config.input_features, **config.output_features},
            "norm_map": config.normalization_mapping,
            "stats": dataset.meta.stats,
        },
        "rename_observations_processor": {"rename_map": cfg.rename_map},
    }
    preprocess, _ = load_processors(config, config.pretrained_path, overrides)

    def load(names: list[int]) -> dict[str, Tensor]:
        batch = default_collate([dataset[position[name]] for name in names])
        for camera in dataset.meta.camera_keys:
            if batch[camera].dtype == torch.uint8:
                batch[camera] = batch[camera].to(config.device).to(torch.float32) / 255.0
        return coupling_inputs(config, preprocess(batch))

    return indices, load


def _check(cfg: TrainPipelineConfig) -> PreTrainedConfig:
    config = cfg.policy
    if not is_student(config) or not config.use_reflow:
        raise ValueError(
            "the training flags name no student; pass --policy.path=<folder of `hf-memopt prepare-student`>"
        )
    if not config.has_teacher:
        raise ValueError(
            f"reflow_target={config.reflow_target!r}, couplings_path={config.couplings_path!r}: precompute needs a "
            "teacher with weights of its own, and no couplings to read"
        )
    if not config.pretrained_path:
        raise ValueError("precompute needs --policy.path=<student>, which says how frames are preprocessed")
    if cfg.dataset.streaming:
        raise ValueError(
            "dataset.streaming=true: couplings are of numbered frames, which streamed data do not give; download the "
            "dataset (--dataset.streaming=false)"
        )
    config.couplings_seed = 0 if config.couplings_seed is None else config.couplings_seed
    return config


@contextmanager
def _arithmetic_of_training(cfg: TrainPipelineConfig) -> Iterator[None]:
    """As lerobot's training loop: allow TF32, and let cuDNN choose by speed without `cudnn_deterministic`."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32
    cudnn.deterministic, cudnn.benchmark = cfg.cudnn_deterministic, not cfg.cudnn_deterministic
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32 = before
