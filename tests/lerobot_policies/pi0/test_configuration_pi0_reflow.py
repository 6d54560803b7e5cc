import dataclasses

import pytest
from late_imports import LateModule

configuration_pi0_reflow = LateModule("hf_memopt.lerobot.pi0.configuration_pi0_reflow")
reflow_options = LateModule("hf_memopt.lerobot.flow.reflow_options")
configuration_pi0 = LateModule("lerobot.policies.pi0.configuration_pi0")


def test_all_else_is_stock() -> None:
    stock, ours = configuration_pi0.PI0Config(), configuration_pi0_reflow.PI0ReflowConfig()
    assert reflow_options.is_student(ours)
    for field in dataclasses.fields(stock):
        assert getattr(ours, field.name) == getattr(stock, field.name), field.name


def test_unusable_settings_are_refused_by_name() -> None:
    make = configuration_pi0_reflow.PI0ReflowConfig
    with pytest.raises(ValueError, match="share_prefix='yes' is unknown; use one of: auto, on, off"):
        make(share_prefix="yes")
    with pytest.raises(ValueError, match="use_reflow=true needs teacher_model_path"):
        make(use_reflow=True)
    with pytest.raises(ValueError, match="Invalid paligemma_variant: gemma_7b"):
        make(paligemma_variant="gemma_7b")
