from typing import Any

import pytest
import torch
from late_imports import LateModule

configuration_pi0_reflow = LateModule("hf_memopt.lerobot.pi0.configuration_pi0_reflow")
policies = LateModule("lerobot.policies")
configuration_pi0 = LateModule("lerobot.policies.pi0.configuration_pi0")
pi0_toys = LateModule("pi0_toys")

pytestmark = pytest.mark.usefixtures("toy_pi0")


def described(processor: Any) -> list[tuple[type, dict[str, Any]]]:
    return [(type(step), step.get_config()) for step in processor.steps]


def test_the_steps_are_stock_lerobots() -> None:
    statistics = {
        name: {"mean": torch.full((14,), 2.0), "std": torch.full((14,), 4.0)}
        for name in ("observation.state", "action")
    }
    configs = (
        configuration_pi0.PI0Config(**pi0_toys.settings()),
        configuration_pi0_reflow.PI0ReflowConfig(**pi0_toys.settings()),
    )
    stock, ours = (policies.make_pre_post_processors(config, dataset_stats=statistics) for config in configs)
    assert [described(each) for each in ours] == [described(each) for each in stock]
    assert torch.allclose(ours[1](torch.ones(1, 14)), torch.full((1, 14), 6.0))
