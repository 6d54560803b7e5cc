"""lerobot's configuration of a run: that of a `train_config.json` or a policy, with a spec's fields set."""

import dataclasses
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import draccus
from draccus.utils import DecodingError
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig, parser
from lerobot.configs.train import TrainPipelineConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from hf_memopt.command_line import argparse_raising
from hf_memopt.planning.job import Job
from hf_memopt.planning.models.model_batches import parse_image_size
from hf_memopt.planning.models.model_config import MAX_LAYERS, read_config
from hf_memopt.planning.workloads.robot_policies import PolicyFile
from hf_memopt.ranges import COUNT, Range

SIMULATED = ("act", "diffusion", "pi0", "pi05", "smolvla")
# Stands for data of the user's, which a policy's configuration does not name.
DATASET = "DATASET"

# From a spec's fields to lerobot's flags.
_FLAGS = {
    "batch_size": "batch_size",
    "effective_batch": "batch_size",
    "lora_rank": "peft.r",
    "lora_targets": "peft.target_modules",
    "dtype": "policy.dtype",
    "freeze_vision_tower": "policy.freeze_vision_encoder",
    "checkpointing": "policy.gradient_checkpointing",
}
# Fields that are read elsewhere, or say nothing about the training.
_OTHERS = {"model", "set", "accumulation", "num_gpus", "precision", "seq_len", "images_per_sample", "image_size"}
_OTHERS |= {"offload", "gpu", "host", "disk", "link", "check", "explain", "json", "timeline", "snapshot", "output"}
_OTHERS |= {"workers"}
_AUTOCAST = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
# Numbers of dimensions by the kind of a feature, as lerobot's policies read them.
_DIMENSIONS = {FeatureType.VISUAL: 3, FeatureType.STATE: 1, FeatureType.ENV: 1, FeatureType.ACTION: 1}
# No published policy has a size near it.
_LARGEST = 10**6
# Layers and cameras, which may be none, are simulated one by one.
_PART = re.compile(r"\w+_(layers|cameras)")
# Numbers that are no sizes.
_OF_TRAINING = re.compile(r"(optimizer|scheduler|drop)_\w+")


def training_config(spec: Job, file: PolicyFile) -> TrainPipelineConfig:
    """Return the run that `lerobot-train` would make, with its optimizer and scheduler.

    A `train_config.json` is the run itself; a folder or a hub id, one that goes on from its policy, with the settings
    of the run that made it, or lerobot's own. ValueError for a run that is not simulated, or cannot be read.
    """
    if file.kind not in SIMULATED:
        recipe = "; for a student of reflow use --recipe" if file.kind.endswith("_reflow") else ""
        raise ValueError(
            f"model={spec.model!r} is a policy of type {file.kind!r}; those that are simulated are "
            f"{', '.join(SIMULATED)}{recipe}"
        )
    _check_fields(spec, file.kind)
    with _quiet():
        cfg = _read(spec, file)
    _check_sizes(cfg, f"model={spec.model!r}")
    set_features(cfg.policy, spec)
    _check_run(cfg)
    # A new run: that of the file has a folder already.
    cfg.output_dir, cfg.resume = None, False
    return cfg


def autocast(policy: PreTrainedConfig, asked: str | None) -> str:
    """Return Accelerate's mixed precision in lerobot's run; `asked` counts where the policy says nothing."""
    if asked == "auto":
        raise ValueError("precision='auto' tries both for a recipe; name no, bf16 or fp16")
    if hasattr(policy, "dtype"):
        given, field = _AUTOCAST[policy.dtype], f"dtype={policy.dtype!r}"
    elif policy.use_amp:
        given, field = "fp16", "use_amp=true"
    else:
        return asked or "no"
    if asked not in (None, given):
        raise ValueError(f"precision={asked!r}: lerobot's autocast follows the policy's {field}; change that one")
    return given


@contextmanager
def complaints_as_errors() -> Iterator[None]:
    """Raise ValueError in place of the complaints with which lerobot's parser ends the process."""
    try:
        with argparse_raising():
            yield
    except SystemExit as ending:
        complaint = ending.__context__
        if not isinstance(complaint, DecodingError):
            raise
        raise ValueError(_innermost(complaint)) from complaint


def set_features(policy: PreTrainedConfig, spec: Job) -> None:
    """Give a policy the cameras that the spec asks for, and state and actions as wide as they may be if it has none."""
    inputs, outputs = dict(policy.input_features or {}), dict(policy.output_features or {})
    if spec.image_size is not None or spec.images_per_sample is not None or not policy.image_features:
        others = {name: each for name, each in inputs.items() if each.type is not FeatureType.VISUAL}
        inputs = {**_cameras(policy, spec), **others}
    inputs.setdefault(OBS_STATE, PolicyFeature(FeatureType.STATE, (_width(policy, OBS_STATE, "max_state_dim"),)))
    outputs.setdefault(ACTION, PolicyFeature(FeatureType.ACTION, (_width(policy, ACTION, "max_action_dim"),)))
    policy.input_features, policy.output_features = inputs, outputs


def _check_fields(spec: Job, kind: str) -> None:
    for name, value in spec.said().items():
        if name not in _FLAGS and name not in _OTHERS:
            raise ValueError(
                f"{name}={value!s}: lerobot's training has no such setting; its own go by set=NAME=VALUE, such as "
                "set=policy.train_expert_only=true, as they go to lerobot-train"
            )
    if (spec.num_gpus or 1) > 1:
        raise ValueError(f"num_gpus={spec.num_gpus}: a policy's training is simulated on one GPU")
    if (spec.accumulation or 1) > 1:
        raise ValueError(f"accumulation={spec.accumulation}: lerobot updates after each batch; set batch_size alone")
    if None not in (spec.batch_size, spec.effective_batch) and spec.batch_size != spec.effective_batch:
        raise ValueError(
            f"effective_batch={spec.effective_batch}: lerobot updates after each batch, of batch_size="
            f"{spec.batch_size}; name one of them"
        )
    if spec.checkpointing == "selective":
        raise ValueError(
            "checkpointing='selective': lerobot's policies checkpoint all of their blocks or none; use full"
        )
    known = {each.name for each in dataclasses.fields(PreTrainedConfig.get_choice_class(kind))}
    for name, value in spec.said().items():
        of, _, field = _FLAGS.get(name, "").partition(".")
        if of == "policy" and field not in known:
            raise ValueError(f"{name}={value!s}: policies of type {kind!r} have no field {field}; leave it out")


def _read(spec: Job, file: PolicyFile) -> TrainPipelineConfig:
    flags = [f"--{text}" for text in spec.set]
    flags += [f"--{_FLAGS[name]}={_text(name, value)}" for name, value in spec.said().items() if name in _FLAGS]
    try:
        with complaints_as_errors():
            if file.is_run:
                cfg = TrainPipelineConfig.from_pretrained(file.path, cli_args=flags)
            else:
                cfg = _new_run(file.path.parent, flags)
        if cfg.use_policy_training_preset:
            cfg.optimizer, cfg.scheduler = cfg.policy.get_optimizer_preset(), cfg.policy.get_scheduler_preset()
    except Exception as error:  # a forged file can raise anything
        given = f" with {' '.join(flags)}" if flags else ""
        raise ValueError(f"lerobot does not read {file.path}{given}: {error}") from error
    model = Path(str(spec.model))
    if not model.is_file() or not file.is_run:
        cfg.policy.pretrained_path = model.parent if model.is_file() else model
    return cfg


def _new_run(folder: Path, flags: list[str]) -> TrainPipelineConfig:
    """Return a run with lerobot's defaults, of a policy on data that the user has to name."""
    of_policy = parser.get_cli_overrides("policy", flags)
    others = [flag for flag in flags if not flag.startswith("--policy.")]
    run = draccus.parse(TrainPipelineConfig, args=[f"--dataset.repo_id={DATASET}", *others])
    run.policy = PreTrainedConfig.from_pretrained(folder, cli_overrides=of_policy)
    run.policy.push_to_hub = run.policy.push_to_hub and run.policy.repo_id is not None
    return run


def _text(name: str, value: Any) -> str:
    if name == "lora_targets" and value != "all-linear":
        return json.dumps(str(value).split(","))
    if name == "checkpointing":
        return str(value == "full").lower()
    return str(value).lower()


def _check_run(cfg: TrainPipelineConfig) -> None:
    policy: Any = cfg.policy
    for field, refused, why in (
        ("reward_model", cfg.reward_model is not None, "a reward model trains"),
        ("sample_weighting", cfg.sample_weighting is not None, "weights of samples are computed in the run"),
        ("policy.use_peft", policy.use_peft and cfg.peft is None, "its train_config.json says which adapters it has"),
        (
            "policy.compile_model",
            getattr(policy, "compile_model", False),
            "compiled code is not seen; with set=policy.compile_model=false it is",
        ),
    ):
        if refused:
            raise ValueError(f"{field} is set: such a run is not simulated, since {why}")
    if hasattr(policy, "vlm_model_name"):
        _check_vlm(policy.vlm_model_name)


def _check_vlm(name: str) -> None:
    try:
        read_config(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"policy.vlm_model_name={name!r}: the VLM's config.json, from which lerobot takes its sizes, cannot be "
            f"read ({error}); download it once with access to the hub, or name a folder that has it by "
            "set=policy.vlm_model_name=FOLDER"
        ) from error


def _check_sizes(cfg: TrainPipelineConfig, source: str) -> None:
    """Raise ValueError for numbers that no policy has, such as billions of steps in a chunk, which lerobot lists."""
    policy: Any = cfg.policy
    COUNT.check(f"{source}: batch_size", cfg.batch_size)
    COUNT.check(f"{source}: peft.r", cfg.peft and cfg.peft.r)
    for each in dataclasses.fields(policy):
        value, is_part = getattr(policy, each.name), _PART.fullmatch(each.name)
        default = each.default if isinstance(each.default, int) else 1
        least, most = (0, MAX_LAYERS) if is_part else (1, _LARGEST)
        allowed = Range(at_least=min(least, default), at_most=most, whole=True)
        for size in value if isinstance(value, list | tuple) else [value]:
            if type(size) is int and not _OF_TRAINING.fullmatch(each.name):
                allowed.check(f"{source}: policy.{each.name}", size)
    for name in ("input_features", "output_features"):
        features = getattr(policy, name) or {}
        Range(at_most=MAX_LAYERS).check(f"{source}: number of policy.{name}", len(features))
        for key, feature in features.items():
            field = f"{source}: policy.{name}.{key}.shape"
            for size in feature.shape:
                Range(at_least=1, at_most=_LARGEST, whole=True).check(field, size)
            if len(feature.shape) != _DIMENSIONS.get(feature.type, len(feature.shape)):
                raise ValueError(f"{field}={feature.shape} must have length {_DIMENSIONS[feature.type]}; correct it")


def _cameras(policy: PreTrainedConfig, spec: Job) -> dict[str, PolicyFeature]:
    given = policy.image_features
    size = parse_image_size(spec.image_size)
    if size is None and not given:
        raise ValueError(
            f"model={spec.model!r}: its input_features name no camera, as lerobot takes them from the dataset; name "
            "the train_config.json of a run, or give image_size, and images_per_sample for more than one camera"
        )
    shape = next(iter(given.values())).shape if size is None else (3, *size)
    names = list(given) or [f"{OBS_IMAGES}.camera1"]
    if spec.images_per_sample is not None:
        names = [f"{OBS_IMAGES}.camera{number + 1}" for number in range(spec.images_per_sample)]
    return {name: PolicyFeature(FeatureType.VISUAL, shape) for name in names}


def _width(policy: PreTrainedConfig, name: str, field: str) -> int:
    known = {**(policy.input_features or {}), **(policy.output_features or {})}
    if name in known:
        return int(known[name].shape[0])
    if not hasattr(policy, field):
        raise ValueError(
            f"policy type {policy.type!r}: its configuration lacks {name}, as lerobot takes it from the dataset; name "
            "the train_config.json of a run"
        )
    return int(getattr(policy, field))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep from the user that this machine lacks the device that a configuration names."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


def _innermost(error: BaseException) -> str:
    """Return the fault in words; lerobot's own name the field where the cause does not."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return str(error) if cause is error else f"{error}: {cause}"
