"""Policy checkpoints on disk or on the hub, checked before anything depends on them."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from httpx import HTTPError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from safetensors.torch import load_file
from torch import Tensor

from hf_memopt.disk.files_on_disk import files_sha256
from hf_memopt.lerobot.files.checkpoint_files import (
    ADAPTER_CONFIG_FILE,
    COPY_AGAIN,
    POSTPROCESSOR_FILE,
    PREPROCESSOR_FILE,
    adapter_files,
    base_name,
    check_header,
    check_processors,
    file_in,
    is_adapter,
    merged,
    no_remote_code,
    read_object,
    read_steps,
)
from hf_memopt.lerobot.flow.known_flows import POLICY_TYPES, flow_of

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
# Where lerobot 0.6.2 writes a sharded run's weights with --checkpoint_format=dcp.
_SHARDS = "pytorch_model_fsdp_0"

# lerobot.processor.normalize_processor
_NORMALIZED_BY = {
    "IDENTITY": (),
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


def resolve_checkpoint(path_or_id: str | Path, revision: str | None = None) -> Path:
    """Return the local folder of a policy checkpoint; ValueError if there is none.

    `path_or_id` is a `pretrained_model` folder, a training run's output folder (its last checkpoint is taken), or a hub
    id such as `lerobot/smolvla_base`, which is downloaded, from its main branch or `revision`.
    """
    path = Path(path_or_id).expanduser()
    for folder in (path, path / "pretrained_model", path / "checkpoints" / "last" / "pretrained_model"):
        if (folder / CONFIG_FILE).is_file():
            return folder
    if path.exists():
        raise ValueError(f"{path} holds no policy: there is no {CONFIG_FILE} in it or in its last checkpoint")
    try:
        patterns = ["*.json", "*.safetensors", "README.md", "tokenizer/*"]
        return Path(snapshot_download(str(path_or_id), revision=revision, allow_patterns=patterns))
    except (HTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"{path_or_id!r} is neither a checkpoint folder nor a hub id that can be reached ({error}); "
            "pass the pretrained_model folder of a trained policy"
        ) from error


def load_config(folder: Path) -> PreTrainedConfig:
    """Read the checkpoint's configuration; ValueError if it is of another type than `POLICY_TYPES`."""
    file = file_in(folder, CONFIG_FILE)
    kind = read_object(file).get("type")
    if kind not in POLICY_TYPES:
        raise ValueError(f"{folder} holds a policy of type {kind!r}; reflow needs one of: {', '.join(POLICY_TYPES)}")
    try:
        return PreTrainedConfig.from_pretrained(folder)
    except Exception as error:
        raise ValueError(
            f"{file} is not a usable configuration: {error.__cause__ or error}; correct that field"
        ) from error


def load_policy(folder: Path, **changes: Any) -> PreTrainedPolicy:
    """Load a policy strictly, on the CPU, without the hub and without touching the random generator.

    `changes` are fields of its configuration. An adapter is merged into the weights of its base policy.
    """
    check_weights_file(folder)
    weights_folder = folder_of_weights(folder)
    # lerobot moves a loaded policy to the device that its checkpoint names.
    fixed = {"device": "cpu", "compile_model": False, "rtc_config": None}
    config = dataclasses.replace(load_config(folder), **fixed, **changes)
    flow = flow_of(config)
    vlm = f"{flow.vlm_field}={getattr(config, flow.vlm_field)!r}"
    with torch.random.fork_rng(devices=[]), no_remote_code():
        try:
            policy = flow.load(weights_folder, config)
        except RuntimeError as error:
            whose = "its" if weights_folder == folder else f"{folder}'s"
            raise ValueError(f"the weights in {weights_folder} do not fit {whose} {CONFIG_FILE}: {error}") from error
        except (OSError, HFValidationError) as error:
            raise ValueError(
                f"the VLM of {folder} cannot be read: {vlm} ({error}); write its folder or hub id into {CONFIG_FILE}, "
                f"and as tokenizer_name into {PREPROCESSOR_FILE}"
            ) from error
        except Exception as error:
            raise ValueError(
                f"no model can be built from {folder / CONFIG_FILE}, with {vlm}: {error}; correct that field"
            ) from error
        return merged(policy, folder) if is_adapter(folder) else policy


def load_teacher(folder: Path, student: PreTrainedConfig) -> PreTrainedPolicy:
    """Load a teacher as its student's configuration wants it; see `load_policy`."""
    flow = flow_of(student)
    changes = flow.settings_of_teacher(student)
    if getattr(student, "teacher_num_steps", None) is not None:
        changes[flow.steps_field] = student.teacher_num_steps
    return load_policy(folder, **changes)


def folder_of_weights(folder: Path) -> Path:
    """Return the folder with a policy's whole weights: its own, or for an adapter that of its base policy."""
    if not is_adapter(folder):
        return folder
    name = base_name(folder)
    try:
        return folder_of_weights(resolve_checkpoint(name))
    except ValueError as error:
        raise ValueError(
            f"the base policy of the adapter in {folder} cannot be found: {error} (or correct the name in "
            f"{folder / ADAPTER_CONFIG_FILE})"
        ) from error


def weights_digest(folder: Path) -> str:
    """Return a SHA-256 of a policy's weights: of its file, or of an adapter's files and its base policy's."""
    base = folder_of_weights(folder)
    digest = files_sha256([base / WEIGHTS_FILE], base)
    if not is_adapter(folder):
        return digest
    return hashlib.sha256(f"{digest} {files_sha256(adapter_files(folder), folder)}".encode()).hexdigest()


def check_weights_file(folder: Path) -> None:
    """Raise ValueError if a file of weights is missing, damaged or a link out of its folder; loads no tensor."""
    if is_adapter(folder):
        adapter_files(folder)
        check_weights_file(folder_of_weights(folder))
        return
    if (folder / _SHARDS).is_dir() and not (folder / WEIGHTS_FILE).exists():
        raise ValueError(
            f"{folder} holds sharded weights ({_SHARDS}) and no {WEIGHTS_FILE}; run "
            f"`lerobot-convert-dcp --checkpoint_dir={folder}` first"
        )
    check_header(file_in(folder, WEIGHTS_FILE))


def check_same_architecture(student: PreTrainedConfig, teacher: PreTrainedConfig) -> None:
    """Raise a ValueError that names every field in which the two velocity fields differ."""
    fields = flow_of(student).architecture_fields
    pairs = {name: (_plain(getattr(student, name)), _plain(getattr(teacher, name))) for name in fields}
    for kind in ("input_features", "output_features"):
        ours, theirs = (_shapes(getattr(config, kind)) for config in (student, teacher))
        pairs |= {f"{kind}[{key}]": (ours.get(key), theirs.get(key)) for key in ours | theirs}
    different = [f"{name} (student {a}, teacher {b})" for name, (a, b) in pairs.items() if a != b]
    if different:
        raise ValueError(
            f"student and teacher differ in {'; '.join(different)}. Start from a student made by "
            "`hf-memopt prepare-student`, which keeps the teacher's architecture, and use data with the same features"
        )


def check_same_statistics(
    teacher_folder: Path, config: PreTrainedConfig, dataset_stats: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise a ValueError that names a feature with other statistics in the data than in the teacher's files, or none.

    lerobot replaces a fine-tuned policy's statistics by the dataset's, and the teacher would teach something else. A
    feature without statistics it passes on as it is.
    """
    check_processors(teacher_folder)
    _, saved = _normalizer(teacher_folder, PREPROCESSOR_FILE, "normalizer_processor")
    for feature, statistic in normalizing_statistics(config):
        theirs = saved.get(f"{feature}.{statistic}")
        ours = dataset_stats.get(feature, {}).get(statistic)
        if ours is None:
            raise ValueError(
                f"the dataset's meta/stats.json has no {statistic} of {feature!r}, by which the policy normalises; "
                "compute its statistics again (quantiles: lerobot's augment_dataset_quantile_stats.py)"
            )
        if theirs is None:
            raise ValueError(
                f"{teacher_folder / PREPROCESSOR_FILE} has no {statistic} of {feature!r}: the teacher has learned from "
                "values that were not normalised, as data without statistics leave them; train it again on these data"
            )
        theirs, ours = theirs.flatten(), torch.as_tensor(ours, dtype=theirs.dtype).flatten()
        if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-6):
            raise ValueError(
                f"the teacher normalised {feature!r} with {statistic} {_short(theirs)}, the dataset has "
                f"{_short(ours)}. Reflow on the dataset that the teacher was trained on, or put the teacher's "
                "statistics into the dataset's meta/stats.json"
            )


def check_normalizers(folder: Path, config: PreTrainedConfig) -> None:
    """Raise a ValueError that names a needed statistic which a normaliser lacks; lerobot passes over it."""
    for name, kind, features in (
        (PREPROCESSOR_FILE, "normalizer_processor", config.input_features),
        (POSTPROCESSOR_FILE, "unnormalizer_processor", config.output_features),
    ):
        settings, saved = _normalizer(folder, name, kind)
        modes = {each: mode.value for each, mode in config.normalization_mapping.items()}
        for feature, statistic in normalizing_statistics(config):
            known = f"{feature}.{statistic}" in saved and feature in settings["features"]
            if feature in features and not (known and settings["norm_map"] == modes):
                raise ValueError(
                    f"{folder / name} does not normalise {feature!r} by its {statistic}, which {CONFIG_FILE} asks for; "
                    f"{COPY_AGAIN}"
                )


def normalizing_statistics(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Yield the statistics that a policy's normaliser uses, as pairs of a feature and e.g. `"mean"`."""
    features = {**(config.input_features or {}), **(config.output_features or {})}
    for feature, description in features.items():
        kind = description.type.value
        mode = config.normalization_mapping.get(kind)
        name = "IDENTITY" if mode is None else mode.value
        if name not in _NORMALIZED_BY:
            raise ValueError(
                f"normalization_mapping: the statistics of mode {name!r} ({kind}) are not known; use one of "
                f"{', '.join(_NORMALIZED_BY)}"
            )
        for statistic in _NORMALIZED_BY[name]:
            yield feature, statistic


def _normalizer(folder: Path, name: str, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for step in read_steps(folder / name):
        if step["registry_name"] == kind:
            return step.get("config", {}), load_file(folder / step["state_file"]) if "state_file" in step else {}
    return {}, {}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shapes(features: Mapping[str, Any] | None) -> dict[str, tuple[int, ...]]:
    return {key: tuple(feature.shape) for key, feature in (features or {}).items()}


def _short(tensor: Tensor) -> list[float]:
    return [round(value, 4) for value in tensor.tolist()]
