import dataclasses

import pytest
from late_imports import LateModule

reflow_options = LateModule("hf_memopt.lerobot.flow.reflow_options")
pi0_toys = LateModule("pi0_toys")


def test_all_else_is_stock(pi: str) -> None:
    kind = pi0_toys.KINDS[pi]
    stock, ours = kind.config(), kind.student_config()
    assert reflow_options.is_student(ours)
    for field in dataclasses.fields(stock):
        assert getattr(ours, field.name) == getattr(stock, field.name), field.name


def test_unusable_settings_are_refused_by_name(pi: str) -> None:
    make = pi0_toys.KINDS[pi].student_config
    with pytest.raises(ValueError, match="share_prefix='yes' is unknown; use one of: auto, on, off"):
        make(share_prefix="yes")
    with pytest.raises(ValueError, match="use_reflow=true needs teacher_model_path"):
        make(use_reflow=True)
    with pytest.raises(ValueError, match="Invalid paligemma_variant: gemma_7b"):
        make(paligemma_variant="gemma_7b")
