import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from safetensors.torch import save_file
from torch import Tensor

policy_files = LateModule("hf_memopt.lerobot.policy_files")
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
        ("type", "act", "holds a policy of type 'act'; reflow needs one of: smolvla, smolvla_reflow, pi0"),
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


def test_statistics_that_normalise(config: Any) -> None:
    named = [(STATE, "mean"), (STATE, "std"), (ACTION, "mean"), (ACTION, "std")]
    assert list(policy_files.normalizing_statistics(config)) == named
    mode = configs.NormalizationMode
    other = dataclasses.replace(config, normalization_mapping={"STATE": mode.IDENTITY, "ACTION": mode.MIN_MAX})
    assert list(policy_files.normalizing_statistics(other)) == [(ACTION, "min"), (ACTION, "max")]
    assert (
        list(policy_files.normalizing_statistics(dataclasses.replace(config, input_features={}, output_features={})))
        == []
    )


def statistics(**changes: Tensor) -> dict[str, Tensor]:
    names = (f"{feature}.{statistic}" for feature in (STATE, ACTION) for statistic in ("mean", "std"))
    return {name: torch.tensor([1.0, 2.0]) for name in names} | changes


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
    near, far = [1.0, 2.0 + 1e-5], [1.0, 2.01]
    policy_files.check_same_statistics(folder, config, {STATE: {"mean": near, "std": near}, ACTION: {"mean": near}})
    policy_files.check_same_statistics(
        folder, config, {STATE: {"max": far}, IMAGE: {"mean": far}}
    )  # statistics that normalise nothing
    message = re.escape(
        f"the teacher normalised {ACTION!r} with mean [1.0, 2.0], the dataset has [1.0, 2.01]. Reflow on"
    )
    with pytest.raises(ValueError, match=message):
        policy_files.check_same_statistics(folder, config, {STATE: {"mean": near}, ACTION: {"mean": far}})
    with pytest.raises(ValueError, match=re.escape("the dataset has [1.0, 2.0, 3.0]")):
        policy_files.check_same_statistics(folder, config, {STATE: {"std": [1.0, 2.0, 3.0]}})


def test_a_normaliser_that_lacks_nothing_is_accepted(write: Callable[..., Path], config: Any) -> None:
    policy_files.check_normalizers(write(statistics()), config)


def test_a_normaliser_that_lacks_a_statistic_is_refused(write: Callable[..., Path], config: Any) -> None:
    tensors = statistics()
    del tensors[f"{ACTION}.std"]
    message = f"policy_postprocessor.json does not normalise '{ACTION}' by its std, which config.json asks for; copy"
    with pytest.raises(ValueError, match=message):
        policy_files.check_normalizers(write(tensors), config)


@pytest.mark.parametrize(
    "settings", [{"features": {ACTION: {}}}, {"norm_map": {"STATE": "MIN_MAX", "ACTION": "MIN_MAX"}}]
)
def test_a_normaliser_of_other_features_or_modes_is_refused(
    settings: dict[str, Any], write: Callable[..., Path], config: Any
) -> None:
    with pytest.raises(ValueError, match=f"policy_preprocessor.json does not normalise '{STATE}' by its mean"):
        policy_files.check_normalizers(write(statistics(), **settings), config)
