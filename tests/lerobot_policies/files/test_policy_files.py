import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_imports import LateModule
from safetensors.torch import save_file
from torch import Tensor

policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
configs = LateModule("lerobot.configs")
configuration_smolvla = LateModule("lerobot.policies.smolvla.configuration_smolvla")

STATE, IMAGE, ACTION = "observation.state", "observation.images.top", "action"


@pytest.fixture
def config() -> Any:
    """A configuration that normalises states and actions by mean and deviation, and no images."""
    kind, feature = configs.FeatureType, configs.PolicyFeature
    return configuration_smolvla.SmolVLAConfig(
        device="cpu",
        input_features={STATE: feature(kind.STATE, (2,)), IMAGE: feature(kind.VISUAL, (3, 8, 8))},
        output_features={ACTION: feature(kind.ACTION, (2,))},
    )


# ------------------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("below", ["", "pretrained_model", "checkpoints/last/pretrained_model"])
def test_a_checkpoint_is_found_in_the_folders_that_stand_for_it(below: str, tmp_path: Path) -> None:
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    (tmp_path / below / "config.json").write_text("{}")
    assert policy_files.resolve_checkpoint(tmp_path) == tmp_path / below
    assert policy_files.resolve_checkpoint(str(tmp_path)) == tmp_path / below


def test_a_folder_without_a_policy_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} holds no policy: there is no config.json in it or in its last"):
        policy_files.resolve_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["/nowhere/teacher", "nobody/nothing", "not a name!"])
def test_what_is_neither_a_folder_nor_on_the_hub_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is neither .*; pass the pretrained_model folder of a trained"):
        policy_files.resolve_checkpoint(name)


# ------------------------------------------------------------------------------------------------ files


def test_weights_in_shards_are_to_be_converted(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    with pytest.raises(ValueError, match=f"run `lerobot-convert-dcp --checkpoint_dir={tmp_path}` first"):
        policy_files.check_weights_file(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="truncated or damaged"):
        policy_files.check_weights_file(tmp_path)


def test_a_configuration_is_read_as_it_was_saved(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    assert policy_files.load_config(tmp_path) == config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("type", "act", "of type 'act'; reflow needs one of: smolvla, smolvla_reflow, pi0, pi0_reflow, pi05, pi05_re"),
        ("type", None, "holds a policy of type None"),
        ("chunk_size", "eight", "config.json is not a usable configuration: (.|\n)*; correct that field"),
    ],
)
def test_another_configuration_is_refused(field: str, value: Any, message: str, config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=message) as caught:
        policy_files.load_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_weights_are_looked_at_before_a_model_is_built(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    for load in (policy_files.check_weights_file, policy_files.load_policy):
        with pytest.raises(ValueError, match=f"{tmp_path} has no model.safetensors"):
            load(tmp_path)
    save_file({"weight": torch.zeros(100)}, file)
    policy_files.check_weights_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    for load in (policy_files.check_weights_file, policy_files.load_policy):
        with pytest.raises(ValueError, match=f"{file} is truncated or damaged"):
            load(tmp_path)


# ------------------------------------------------------------------------------------------------ consistency


def test_equal_velocity_fields_may_have_other_settings(config: Any) -> None:
    other = dataclasses.replace(config, num_steps=3, optimizer_lr=1.0, resize_imgs_with_padding=[512, 512])
    assert config.resize_imgs_with_padding == (512, 512)  # JSON has a list instead
    policy_files.check_same_architecture(config, other)


def test_all_differences_of_architecture_are_named(config: Any) -> None:
    other = dataclasses.replace(
        config, chunk_size=60, num_vlm_layers=4, input_features={STATE: config.input_features[STATE]}
    )
    with pytest.raises(ValueError, match=r"hf-memopt prepare-student") as caught:
        policy_files.check_same_architecture(config, other)
    for part in (
        "chunk_size (student 50, teacher 60)",
        "num_vlm_layers (student 16, teacher 4)",
        f"input_features[{IMAGE}] (student (3, 8, 8), teacher None)",
    ):
        assert part in str(caught.value)
    assert STATE not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "used"),
    [
        ("IDENTITY", ()),
        ("MEAN_STD", ("mean", "std")),
        ("MIN_MAX", ("min", "max")),
        ("QUANTILES", ("q01", "q99")),
        ("QUANTILE10", ("q10", "q90")),
    ],
)
def test_statistics_that_normalise(mode: str, used: tuple[str, ...], config: Any) -> None:
    modes = configs.NormalizationMode
    mapping = {"STATE": modes.MEAN_STD, "ACTION": modes(mode)}
    changed = dataclasses.replace(config, normalization_mapping=mapping)
    expected = [(STATE, "mean"), (STATE, "std"), *((ACTION, statistic) for statistic in used)]
    assert list(policy_files.normalizing_statistics(changed)) == expected
    none = dataclasses.replace(changed, input_features={}, output_features={})
    assert list(policy_files.normalizing_statistics(none)) == []


def test_a_mode_whose_statistics_are_not_known_is_refused(config: Any) -> None:
    changed = dataclasses.replace(config, normalization_mapping={"ACTION": SimpleNamespace(value="LOGARITHM")})
    with pytest.raises(ValueError, match=r"mode 'LOGARITHM' \(ACTION\) are not known; use one of IDENTITY, MEAN_STD"):
        list(policy_files.normalizing_statistics(changed))


NAMES = ("mean", "std", "min", "max", "q01", "q99", "q10", "q90")


def statistics(**changes: Tensor) -> dict[str, Tensor]:
    names = (f"{feature}.{statistic}" for feature in (STATE, ACTION) for statistic in NAMES)
    return {name: torch.tensor([1.0, 2.0]) for name in names} | changes


def of_data(**changes: list[float]) -> dict[str, dict[str, list[float]]]:
    """Return statistics of state and action; `changes` are those of the action."""
    return {STATE: {name: [1.0, 2.0] for name in NAMES}, ACTION: {name: [1.0, 2.0] for name in NAMES} | changes}


@pytest.fixture
def write(tmp_path: Path, config: Any) -> Callable[..., Path]:
    """A function that writes processors with given statistics and settings of the normaliser."""

    def write(tensors: dict[str, Tensor], **settings: Any) -> Path:
        modes = {kind: mode.value for kind, mode in config.normalization_mapping.items()}
        for file, kind in (("policy_preprocessor", "normalizer"), ("policy_postprocessor", "unnormalizer")):
            save_file(tensors, tmp_path / f"{file}.safetensors")
            step = {
                "registry_name": f"{kind}_processor",
                "config": {"features": {STATE: {}, ACTION: {}}, "norm_map": modes, **settings},
                "state_file": f"{file}.safetensors",
            }
            (tmp_path / f"{file}.json").write_text(json.dumps({"steps": [step]}))
        return tmp_path

    return write


def test_statistics_of_the_data_are_the_teachers_up_to_rounding(write: Callable[..., Path], config: Any) -> None:
    folder = write(statistics())
    policy_files.check_same_statistics(folder, config, of_data(mean=[1.0, 2.0 + 1e-5]))
    # Statistics that normalise nothing.
    policy_files.check_same_statistics(folder, config, of_data(max=[1.0, 2.01]) | {IMAGE: {"mean": [5.0]}})
    with pytest.raises(ValueError, match=re.escape("the dataset has [1.0, 2.0, 3.0]")):
        policy_files.check_same_statistics(folder, config, of_data(std=[1.0, 2.0, 3.0]))


def with_mode(config: Any, mode: str) -> Any:
    modes = configs.NormalizationMode
    return dataclasses.replace(config, normalization_mapping={"STATE": modes(mode), "ACTION": modes(mode)})


OF_MODES = [("MEAN_STD", "std"), ("MIN_MAX", "min"), ("QUANTILES", "q99"), ("QUANTILE10", "q10")]


@pytest.mark.parametrize(("mode", "statistic"), OF_MODES)
def test_other_statistics_of_any_mode_are_refused(
    mode: str, statistic: str, write: Callable[..., Path], config: Any
) -> None:
    folder, changed = write(statistics()), with_mode(config, mode)
    message = re.escape(f"normalised {ACTION!r} with {statistic} [1.0, 2.0], the dataset has [1.0, 2.01]. Reflow on")
    with pytest.raises(ValueError, match=message):
        policy_files.check_same_statistics(folder, changed, of_data(**{statistic: [1.0, 2.01]}))


def test_data_without_a_statistic_are_refused(write: Callable[..., Path], config: Any) -> None:
    without_state = {ACTION: of_data()[ACTION]}
    with pytest.raises(ValueError, match=f"meta/stats.json has no mean of '{STATE}', by which the policy normalises"):
        policy_files.check_same_statistics(write(statistics()), config, without_state)


def test_a_teacher_of_data_without_a_statistic_is_refused(write: Callable[..., Path], config: Any) -> None:
    tensors = statistics()
    del tensors[f"{STATE}.std"]
    with pytest.raises(ValueError, match=f"has no std of '{STATE}': the teacher has learned from values that were not"):
        policy_files.check_same_statistics(write(tensors), config, of_data())


def test_a_normaliser_that_lacks_nothing_is_accepted(write: Callable[..., Path], config: Any) -> None:
    policy_files.check_normalizers(write(statistics()), config)


@pytest.mark.parametrize(("mode", "statistic"), OF_MODES)
def test_a_normaliser_that_lacks_a_statistic_is_refused(
    mode: str, statistic: str, write: Callable[..., Path], config: Any
) -> None:
    tensors, changed = statistics(), with_mode(config, mode)
    del tensors[f"{ACTION}.{statistic}"]
    message = f"policy_postprocessor.json does not normalise '{ACTION}' by its {statistic}, which config.json asks for"
    folder = write(tensors, norm_map={"STATE": mode, "ACTION": mode})
    with pytest.raises(ValueError, match=message):
        policy_files.check_normalizers(folder, changed)


@pytest.mark.parametrize(
    "settings", [{"features": {ACTION: {}}}, {"norm_map": {"STATE": "MIN_MAX", "ACTION": "MIN_MAX"}}]
)
def test_a_normaliser_of_other_features_or_modes_is_refused(
    settings: dict[str, Any], write: Callable[..., Path], config: Any
) -> None:
    with pytest.raises(ValueError, match=f"policy_preprocessor.json does not normalise '{STATE}' by its mean"):
        policy_files.check_normalizers(write(statistics(), **settings), config)
