"""The key of a frame's pair: the inputs of the models, and fingerprints of data, settings and teacher."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor

from hf_memopt.disk.digests import files_sha256
from hf_memopt.lerobot.files.policy_files import load_config, normalizing_statistics, weights_digest
from hf_memopt.lerobot.flow.known_flows import flow_of

Statistics = Mapping[str, Mapping[str, Any]]


def coupling_inputs(config: PreTrainedConfig, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors of a preprocessed batch that condition the policy, batch first; padding tokens are zero."""
    names = [key for feature in config.input_features for key in (feature, f"{feature}_padding_mask") if key in batch]
    mask = batch[OBS_LANGUAGE_ATTENTION_MASK].bool()
    return {
        **{name: batch[name] for name in names},
        OBS_LANGUAGE_TOKENS: batch[OBS_LANGUAGE_TOKENS] * mask,
        OBS_LANGUAGE_ATTENTION_MASK: mask,
    }


def without_padding(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    length = int(inputs[OBS_LANGUAGE_ATTENTION_MASK].sum(dim=1).max())
    text = (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)
    return {name: tensor[:, :length] if name in text else tensor for name, tensor in inputs.items()}


def comparable_fields(
    config: PreTrainedConfig, dataset_stats: Statistics, dataset_root: Path | None, teacher: Path | None
) -> dict[str, Any]:
    """Return what a run knows of a `CouplingSpec.key`: all, with the teacher's folder, the dataset and a seed."""
    fields: dict[str, Any] = {
        "solver": "euler",
        "preprocessing": preprocessing_sha256(config, dataset_stats),
        "num_steps": config.teacher_num_steps,
        "dtype": config.teacher_dtype,
        "seed": config.couplings_seed,
        "num_draws": config.couplings_per_frame,
        "dataset": None if dataset_root is None else dataset_sha256(dataset_root),
    }
    if teacher is not None:
        fields["weights"] = weights_digest(teacher)
        fields["num_steps"] = config.teacher_num_steps or getattr(load_config(teacher), flow_of(config).steps_field)
        fields["dtype"] = config.teacher_dtype or "as saved"
    return {name: value for name, value in fields.items() if value is not None}


def preprocessing_sha256(config: PreTrainedConfig, dataset_stats: Statistics) -> str:
    fields = {name: getattr(config, name) for name in (*flow_of(config).architecture_fields, "tokenizer_max_length")}
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
    """Return the SHA-256 of a LeRobotDataset's tables and metadata, and of the names and sizes of its videos."""
    tables = [file for part in ("meta", "data") for file in (root / part).rglob("*") if file.is_file()]
    videos = sorted(file for file in (root / "videos").rglob("*") if file.is_file())
    sizes = [f"{file.relative_to(root).as_posix()} {file.stat().st_size}" for file in videos]
    return hashlib.sha256("\n".join([files_sha256(tables, root), *sizes]).encode()).hexdigest()
