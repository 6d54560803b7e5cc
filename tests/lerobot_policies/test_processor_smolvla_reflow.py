from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule

configuration_smolvla_reflow = LateModule("hf_memopt.lerobot.configuration_smolvla_reflow")
processor_smolvla_reflow = LateModule("hf_memopt.lerobot.processor_smolvla_reflow")
policies = LateModule("lerobot.policies")
configuration_smolvla = LateModule("lerobot.policies.smolvla.configuration_smolvla")
reflow_students = LateModule("reflow_students")

STATISTICS = {
    name: {"mean": torch.full((14,), 2.0), "std": torch.full((14,), 4.0)} for name in ("observation.state", "action")
}


@pytest.fixture
def config(toy_vlm: Path) -> Any:
    return configuration_smolvla_reflow.SmolVLAReflowConfig(**reflow_students.settings(toy_vlm))


def described(processor: Any) -> list[tuple[type, dict[str, Any]]]:
    return [(type(step), step.get_config()) for step in processor.steps]


def test_the_steps_are_stock_lerobots(config: Any, toy_vlm: Path) -> None:
    stock = configuration_smolvla.SmolVLAConfig(**reflow_students.settings(toy_vlm))
    want = policies.make_pre_post_processors(stock, dataset_stats=STATISTICS)
    got = processor_smolvla_reflow.make_smolvla_reflow_pre_post_processors(config, dataset_stats=STATISTICS)
    assert [described(each) for each in got] == [described(each) for each in want]
    assert [each.name for each in got] == ["policy_preprocessor", "policy_postprocessor"]


def test_lerobot_finds_them_and_they_use_the_datasets_statistics(config: Any) -> None:
    preprocess, postprocess = policies.make_pre_post_processors(config, dataset_stats=STATISTICS)
    batch = preprocess({"observation.state": torch.full((14,), 6.0), "task": "reach"})
    assert torch.allclose(batch["observation.state"], torch.ones(1, 14))
    assert batch["observation.language.tokens"].ndim == 2
    assert torch.allclose(postprocess(torch.ones(1, 14)), torch.full((1, 14), 6.0))
