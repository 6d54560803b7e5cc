"""Pairs of noise and actions that belong to a frame of the dataset: the same whenever it is used, or read from disk."""

import copy
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor

from hf_memopt.couplings.key import draw_noise, noise_seed
from hf_memopt.couplings.source import CouplingCache, files_sha256
from hf_memopt.integrations.lerobot.configuration_smolvla_reflow import SELF, SmolVLAReflowConfig
from hf_memopt.integrations.lerobot.policy_files import (
    ARCHITECTURE_FIELDS,
    WEIGHTS_FILE,
    load_config,
    normalizing_statistics,
    resolve_checkpoint,
)

logger = logging.getLogger(__name__)

Statistics = Mapping[str, Mapping[str, Any]]
SOLVER = "euler"


def coupling_inputs(config: SmolVLAReflowConfig, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a preprocessed batch conditions the policy, batch first; padding tokens are zero."""
    names = [key for feature in config.input_features for key in (feature, f"{feature}_padding_mask") if key in batch]
    mask = batch[OBS_LANGUAGE_ATTENTION_MASK].bool()
    return {
        **{name: batch[name] for name in names},
        OBS_LANGUAGE_TOKENS: batch[OBS_LANGUAGE_TOKENS] * mask,
        OBS_LANGUAGE_ATTENTION_MASK: mask,
    }


def without_padding(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs with no more token columns than the longest instruction has."""
    length = int(inputs[OBS_LANGUAGE_ATTENTION_MASK].sum(dim=1).max())
    text = (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)
    return {name: tensor[:, :length] if name in text else tensor for name, tensor in inputs.items()}


def frame_indices(batch: Mapping[str, Tensor]) -> list[int]:
    """The dataset's numbers of the frames in a batch.

    Raises:
        ValueError: the batch does not say.
    """
    if "index" not in batch:
        raise ValueError("the batch has no 'index', which names its frames; couplings need a LeRobotDataset")
    indices: list[int] = batch["index"].flatten().tolist()
    return indices


def frame_noise(config: SmolVLAReflowConfig, batch: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Each frame's own noise, `(batch, chunk, max_action_dim)`; one of `couplings_per_frame`, drawn at random."""
    indices = frame_indices(batch)
    draws = draw_numbers(len(indices), config.couplings_per_frame or 1)
    assert config.couplings_seed is not None
    seeds = [noise_seed(config.couplings_seed, index, draw) for index, draw in zip(indices, draws, strict=True)]
    return draw_noise(seeds, (config.chunk_size, config.max_action_dim)).to(device)


def draw_numbers(batch_size: int, num_draws: int) -> list[int]:
    """Which of its pairs each frame gets in this step, from the global random generator."""
    draws: list[int] = torch.randint(num_draws, (batch_size,)).tolist()
    return draws


class CachedPairs:
    """Pairs from the folder that a policy's configuration names. Copies and pickles open it anew.

    Args:
        config: the student's.
    """

    def __init__(self, config: SmolVLAReflowConfig) -> None:
        self._config = config
        self._cache: CouplingCache | None = None

    def check(self, dataset_stats: Statistics, dataset_root: Path | None) -> None:
        """Refuse couplings that were not made for this policy and this data.

        Raises:
            ValueError: names each field that differs, or the file that is damaged.
        """
        expected = comparable_fields(self._config, dataset_stats, dataset_root)
        self._open().check(expected)
        if "weights" not in expected:
            logger.info("couplings: the teacher is not at hand, so its weights were not compared with the folder's")

    def look_up(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Observation, noise and actions for the frames of a batch.

        Returns:
            The batch, with the stored observations if there are any; noise and actions `(batch, chunk,
            max_action_dim)`, on the batch's device.

        Raises:
            ValueError: a frame has no couplings, or its observation is not what they were computed for.
        """
        cache = self._open()
        indices = frame_indices(batch)
        inputs = None if cache.has_observations else coupling_inputs(self._config, batch)
        coupling = cache.of(indices, draw_numbers(len(indices), cache.plan.num_draws), inputs)
        device = batch["index"].device
        if cache.has_observations:
            batch = {**batch, **{name: tensor.to(device) for name, tensor in coupling.observation.items()}}
        return batch, coupling.noise.to(device), coupling.target.to(device)

    def _open(self) -> CouplingCache:
        if self._cache is None:
            self._cache = CouplingCache(str(self._config.couplings_path))
        return self._cache

    def __deepcopy__(self, memo: dict[int, Any]) -> "CachedPairs":
        return CachedPairs(copy.deepcopy(self._config, memo))

    def __reduce__(self) -> Any:
        return CachedPairs, (self._config,)


def comparable_fields(
    config: SmolVLAReflowConfig, dataset_stats: Statistics, dataset_root: Path | None
) -> dict[str, Any]:
    """Fields of a `CouplingKey` that a run knows: all of them if the teacher is on this machine and a seed is set.

    Args:
        config: the student's.
        dataset_stats: the dataset's.
        dataset_root: its folder; None leaves the dataset out.
    """
    teacher = _teacher_folder(config)
    fields: dict[str, Any] = {
        "solver": SOLVER,
        "preprocessing": preprocessing_sha256(config, dataset_stats),
        "num_steps": config.teacher_num_steps,
        "dtype": config.teacher_dtype,
        "seed": config.couplings_seed,
        "num_draws": config.couplings_per_frame,
        "dataset": None if dataset_root is None else dataset_sha256(dataset_root),
    }
    if teacher is not None:
        fields["weights"] = files_sha256([teacher / WEIGHTS_FILE], teacher)
        fields["num_steps"] = config.teacher_num_steps or load_config(teacher).num_steps
        fields["dtype"] = config.teacher_dtype or "as saved"
    return {name: value for name, value in fields.items() if value is not None}


def preprocessing_sha256(config: SmolVLAReflowConfig, dataset_stats: Statistics) -> str:
    """SHA-256 of what makes a frame into the model's inputs: fields of the configuration, normaliser statistics."""
    fields = {name: getattr(config, name) for name in (*ARCHITECTURE_FIELDS, "tokenizer_max_length")}
    features = {name: list(feature.shape) for name, feature in config.input_features.items()}
    mapping = {kind: mode.value for kind, mode in config.normalization_mapping.items()}
    statistics = {
        f"{feature}.{statistic}": torch.as_tensor(dataset_stats[feature][statistic]).float().flatten().tolist()
        for feature, statistic in normalizing_statistics(config)
        if statistic in dataset_stats.get(feature, {})
    }
    text = json.dumps([fields, features, mapping, statistics], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def dataset_sha256(root: Path) -> str:
    """SHA-256 of a LeRobotDataset's tables and metadata, and of the names and sizes of its videos. Reads the tables."""
    tables = [file for part in ("meta", "data") for file in (root / part).rglob("*") if file.is_file()]
    videos = sorted(file for file in (root / "videos").rglob("*") if file.is_file())
    sizes = [f"{file.relative_to(root).as_posix()} {file.stat().st_size}" for file in videos]
    return hashlib.sha256("\n".join([files_sha256(tables, root), *sizes]).encode()).hexdigest()


def _teacher_folder(config: SmolVLAReflowConfig) -> Path | None:
    path = config.teacher_model_path
    on_this_machine = path and path != SELF and Path(path).expanduser().exists()
    return resolve_checkpoint(str(path)) if on_this_machine else None
