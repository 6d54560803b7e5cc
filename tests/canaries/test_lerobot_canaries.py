"""Canaries of the project in lerobot's commands and in accelerate."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_imports import LateModule
from reliance import (
    CHECKPOINT_FILES,
    CHECKPOINTS,
    INTEGRATION,
    LOOP,
    MODELING,
    PREFIX,
    PROCESSORS,
    RECIPE,
    relied_on_by,
)
from safetensors.torch import load_file

accelerate = LateModule("accelerate")
utils = LateModule("accelerate.utils")
draccus_utils = LateModule("draccus.utils")
checkpoint_files = LateModule("hf_memopt.lerobot.files.checkpoint_files")
modeling_smolvla_reflow = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
lerobot_loop = LateModule("hf_memopt.recipes.reflow.lerobot_loop")
train_utils = LateModule("lerobot.common.train_utils")
processors = LateModule("hf_memopt.lerobot.files.checkpoint_files")
normalize_processor = LateModule("lerobot.processor.normalize_processor")
configs = LateModule("lerobot.configs")
parser = LateModule("lerobot.configs.parser")
dataset_metadata = LateModule("lerobot.datasets.dataset_metadata")
policies = LateModule("lerobot.policies")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
factory = LateModule("lerobot.policies.factory")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")
processor_smolvla = LateModule("lerobot.policies.smolvla.processor_smolvla")
lerobot_train_module = LateModule("lerobot.scripts.lerobot_train")
logging_utils = LateModule("lerobot.utils.logging_utils")
lerobot_runs = LateModule("lerobot_runs")
dynamic_module_utils = LateModule("transformers.dynamic_module_utils")


def test_from_pretrained_takes_a_config_and_strict() -> None:
    with relied_on_by(CHECKPOINTS):
        parameters = inspect.signature(modeling_smolvla.SmolVLAPolicy.from_pretrained).parameters
        assert {"config", "strict"} <= parameters.keys()
        assert not parameters["strict"].default


def test_steps_of_a_smolvla(toy_teacher: Path) -> None:
    with relied_on_by(PROCESSORS):
        config = configs.PreTrainedConfig.from_pretrained(toy_teacher)
        made = processor_smolvla.make_smolvla_pre_post_processors(config)
        steps = {step["registry_name"] for pipeline in made for step in pipeline.get_config()["steps"]}
        of_pi = {"relative_actions_processor", "absolute_actions_processor"}
        of_pi |= {"pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step"}
        assert steps == set(processors.STEPS) - of_pi


def test_processors_are_made_from_where_the_policy_says_once_it_is_there() -> None:
    with relied_on_by(MODELING):
        source = inspect.getsource(lerobot_train_module.train)
        assert source.index("policy = make_policy(") < source.index("= active_cfg.pretrained_path")


def test_transformers_asks_nobody_without_time_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with relied_on_by(CHECKPOINT_FILES):
        asked = {"model_name": "x", "has_local_code": False, "has_remote_code": True}
        assert dynamic_module_utils.resolve_trust_remote_code(None, **asked)
        with checkpoint_files.no_remote_code(), pytest.raises(ValueError, match="trust_remote_code=True"):
            dynamic_module_utils.resolve_trust_remote_code(None, **asked)


class Recorder:
    """A stand-in for every object of a training step, which lists all calls."""

    def __init__(self, calls: list[str], name: str) -> None:
        self._calls, self._name = calls, name

    def __call__(self, *arguments: Any, **kwargs: Any) -> Any:
        return self.forward(*arguments, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        def call(*arguments: Any, **kwargs: Any) -> Any:
            self._calls.append(f"{self._name}.{attribute}")
            if attribute == "forward":
                return torch.tensor(1.0), {"loss": 1.0, "teacher_own_gib": 0.5}
            if attribute == "accumulate":
                return nullcontext()
            if attribute == "autocast":
                return torch.autocast("cpu", enabled=False)
            return arguments[0] if attribute == "unwrap_model" else torch.tensor(1.0)

        return call


def test_order_of_a_training_step() -> None:
    calls: list[str] = []
    policy, optimizer, scheduler, accelerator = (
        Recorder(calls, name) for name in ("policy", "optimizer", "scheduler", "accelerator")
    )
    optimizer.param_groups = [{"lr": 0.1}]  # type: ignore[attr-defined]
    accelerator.num_processes = 1  # type: ignore[attr-defined]
    policy.update = lambda: calls.append("policy.update")  # type: ignore[attr-defined]
    meters = {name: logging_utils.AverageMeter(name) for name in ("loss", "grad_norm", "lr", "update_s")}
    tracker = logging_utils.MetricsTracker(1, 10, 1, meters)
    with relied_on_by(f"{RECIPE} and {MODELING}"):
        tracker, _ = lerobot_train_module.update_policy(
            tracker, policy, {}, optimizer, 1.0, accelerator, lr_scheduler=scheduler
        )
        watched = ("forward", "backward", "clip_grad_norm_", "step", "zero_grad", "update")
        assert [call for call in calls if call.split(".")[1] in watched] == [
            "policy.forward",
            "accelerator.backward",
            "accelerator.clip_grad_norm_",
            "optimizer.step",
            "optimizer.zero_grad",
            "scheduler.step",
            "policy.update",
        ]
        # lerobot logs the numbers that forward returns.
        assert "teacher_own_gib:0.5" in str(tracker)


def test_the_loop_is_one_of_the_two_that_are_known() -> None:
    with relied_on_by(LOOP):
        parameters = list(inspect.signature(inspect.unwrap(lerobot_train_module.train)).parameters)
        if not lerobot_loop.LOOP_ACCUMULATES:
            assert parameters == ["cfg", "accelerator"]
            assert list(inspect.signature(train_utils.load_training_step).parameters) == ["save_dir"]
            assert "accumulate(" not in inspect.getsource(lerobot_train_module.update_policy)
            return
        assert parameters == ["cfg"]
        assert list(inspect.signature(lerobot_train_module.make_accelerator).parameters) == ["cfg"]
        assert "accelerator = make_accelerator(cfg)" in inspect.getsource(lerobot_train_module.train)
        assert list(inspect.signature(train_utils.load_training_metadata).parameters) == ["training_state_dir"]
        settings = importlib.import_module("lerobot.configs.accelerator").AcceleratorConfig()
        assert settings.gradient_accumulation.steps == 1
        assert "with accelerator.accumulate(policy)" in inspect.getsource(lerobot_train_module.update_policy)


def test_lerobot_declares_no_parts_of_a_smolvla_to_shard() -> None:
    """Watch for parts to shard: then `check_replicated` may be wrong."""
    with relied_on_by(f"{INTEGRATION}/reflow/teachers.py"):
        assert not getattr(modeling_smolvla.SmolVLAPolicy, "_fsdp_wrap_modules", None)


def test_accelerators_windows() -> None:
    with lerobot_runs.new_process(()), relied_on_by(RECIPE):
        plugin = utils.GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
        seen = []
        for _ in range(4):
            accelerator._do_sync()
            accelerator.backward(weight.sum())
            optimizer.step()
            optimizer.zero_grad()
            seen.append((accelerator.sync_gradients, weight.item()))
        # Each batch counts half, and only a window's end updates and clears.
        assert seen == [(False, 1), (True, 0), (False, 0), (True, -1)]
        assert isinstance(accelerator._models, list)


def test_make_policy_passes_the_datasets_statistics(
    toy_student: Path, toy_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def from_pretrained(**kwargs: Any) -> torch.nn.Module:
        given.update(kwargs)
        return torch.nn.Identity()

    monkeypatch.setattr(modeling_smolvla_reflow.SmolVLAReflowPolicy, "from_pretrained", from_pretrained)
    config = configs.PreTrainedConfig.from_pretrained(toy_student)
    config.pretrained_path = toy_student
    metadata = dataset_metadata.LeRobotDatasetMetadata("local/toy", root=toy_dataset)
    with relied_on_by(MODELING):
        policies.make_policy(config, ds_meta=metadata)
        assert given["dataset_stats"] == metadata.stats
        assert {"mean", "std", "min", "max"} <= metadata.stats["action"].keys()


def test_policy_is_found_by_its_configs_name() -> None:
    with relied_on_by(f"{INTEGRATION} (file and class names)"):
        assert factory.get_policy_class("smolvla_reflow") is modeling_smolvla_reflow.SmolVLAReflowPolicy


def test_plugin_loading_imports_every_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "canary_plugin"
    package.mkdir()
    for name in ("__init__", "configuration_x", "other"):
        (package / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with relied_on_by(f"{INTEGRATION} (each of its modules must import on its own)"):
        parser.load_plugin("canary_plugin")
        assert {"canary_plugin.configuration_x", "canary_plugin.other"} <= sys.modules.keys()


def test_layout_of_saved_statistics(toy_teacher: Path) -> None:
    with relied_on_by(CHECKPOINTS):
        steps = json.loads((toy_teacher / "policy_preprocessor.json").read_text())["steps"]
        (normalizer,) = [step for step in steps if step["registry_name"] == "normalizer_processor"]
        state = load_file(toy_teacher / normalizer["state_file"])
        assert state["action.mean"].shape == state["observation.state.std"].shape == (2,)
        assert (toy_teacher / "policy_postprocessor.json").is_file()


def test_bad_configuration_carries_its_reason(toy_student: Path, tmp_path: Path) -> None:
    config = json.loads((toy_student / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "share_prefix": "perhaps"}))
    with pytest.raises(draccus_utils.ParsingError) as caught:
        configs.PreTrainedConfig.from_pretrained(tmp_path)
    with relied_on_by(CHECKPOINTS):
        assert "share_prefix='perhaps' is unknown" in str(caught.value.__cause__)


def test_fine_tuning_replaces_the_normalisers_statistics(
    toy_teacher: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watch the reason for comparing the teacher's statistics with the dataset's."""
    load_stats = dataset_metadata.LeRobotDatasetMetadata.__init__

    def shifted(self: dataset_metadata.LeRobotDatasetMetadata, *arguments: Any, **kwargs: Any) -> None:
        load_stats(self, *arguments, **kwargs)
        self.stats["action"]["mean"] = self.stats["action"]["mean"] + 5

    monkeypatch.setattr(dataset_metadata.LeRobotDatasetMetadata, "__init__", shifted)
    lerobot_runs.run(
        lerobot_runs.lerobot_train, *lerobot_runs.train_flags(toy_teacher, toy_dataset, tmp_path / "run", steps=1)
    )
    name = "policy_preprocessor_step_5_normalizer_processor.safetensors"
    saved = load_file(tmp_path / "run" / "checkpoints" / "last" / "pretrained_model" / name)
    with relied_on_by(f"{CHECKPOINTS} (check_same_statistics)"):
        assert (saved["action.mean"] - load_file(toy_teacher / name)["action.mean"]).min() > 4


def test_each_mode_normalises_by_its_statistics_and_no_others() -> None:
    kind, mode_of = configs.FeatureType.ACTION, configs.NormalizationMode
    with relied_on_by(f"{CHECKPOINTS} (_NORMALIZED_BY)"):
        assert {mode.value for mode in mode_of} == policy_files._NORMALIZED_BY.keys()
        for name, used in policy_files._NORMALIZED_BY.items():
            feature = {"action": configs.PolicyFeature(kind, (2,))}
            for left_out in (None, *used):
                stats = {"action": {each: [1.0 + len(each), 3.0] for each in used if each != left_out} | {"count": [4]}}
                step = normalize_processor.NormalizerProcessorStep(feature, {kind: mode_of(name)}, stats=stats)
                with pytest.raises(ValueError, match="requires") if left_out else nullcontext():
                    changed = step._apply_transform(torch.tensor([7.0, 8.0]), "action", kind)
                    assert torch.equal(changed, torch.tensor([7.0, 8.0])) == (not used)


def test_lerobots_resume_is_not_exact(toy_teacher: Path, toy_dataset: Path, tmp_path: Path) -> None:
    """Watch the random generators, restored before the data loader draws from them."""
    lerobot_runs.run(
        lerobot_runs.lerobot_train,
        lerobot_runs.PLUGIN,
        *lerobot_runs.train_flags(toy_teacher, toy_dataset, tmp_path / "run", steps=3),
        "--save_freq=2",
    )
    uninterrupted = lerobot_runs.weights(tmp_path / "run")
    config = tmp_path / "run" / "checkpoints" / "000002" / "pretrained_model" / "train_config.json"
    lerobot_runs.run(lerobot_runs.lerobot_train, f"--config_path={config}", "--resume=true")
    name = "model.action_out_proj.weight"
    with relied_on_by(
        "tests/lerobot_policies/test_lerobot_training.py (exact_resume, which can go once this is exact)"
    ):
        assert not torch.equal(lerobot_runs.weights(tmp_path / "run")[name], uninterrupted[name])


def test_a_canary_names_who_relies_on_it() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"smolvla_flow.py relies on what has changed here: AttributeError"):
        with relied_on_by(PREFIX):
            _ = SimpleNamespace().gone
