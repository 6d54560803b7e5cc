"""The inputs and outputs of a policy, which lerobot takes from the dataset where a configuration has none."""

from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from hf_memopt.jobs.spec import JobSpec
from hf_memopt.jobs.transformers_models.model_batches import parse_image_size


def set_features(policy: PreTrainedConfig, spec: JobSpec) -> None:
    """Give a policy the cameras that the spec asks for, and state and actions as wide as they may be if it has none.

    Raises:
        ValueError: neither the policy nor the spec says how large images are, or nothing says how wide state or
            actions are.
    """
    inputs, outputs = dict(policy.input_features or {}), dict(policy.output_features or {})
    if spec.image_size is not None or spec.images_per_sample is not None or not policy.image_features:
        others = {name: each for name, each in inputs.items() if each.type is not FeatureType.VISUAL}
        inputs = {**_cameras(policy, spec), **others}
    inputs.setdefault(OBS_STATE, PolicyFeature(FeatureType.STATE, (_width(policy, OBS_STATE, "max_state_dim"),)))
    outputs.setdefault(ACTION, PolicyFeature(FeatureType.ACTION, (_width(policy, ACTION, "max_action_dim"),)))
    policy.input_features, policy.output_features = inputs, outputs


def _cameras(policy: PreTrainedConfig, spec: JobSpec) -> dict[str, PolicyFeature]:
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
