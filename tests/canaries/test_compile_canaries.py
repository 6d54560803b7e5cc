"""Canaries of `recipes/lgt/model.py` in torch.compile's arguments and counts."""

import pytest
import torch
from late_imports import LateModule

utils = LateModule("torch._dynamo.utils")


def test_the_limit_of_variants_is_a_setting_and_no_argument() -> None:
    with pytest.raises(TypeError, match="cache_size_limit"):
        torch.compile(torch.nn.Linear(1, 1), cache_size_limit=16)
    assert isinstance(torch._dynamo.config.recompile_limit, int)


def test_a_mode_that_there_is_not_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(RuntimeError, match="dufault"):
        torch.compile(torch.nn.Linear(1, 1), mode="dufault")
    assert {"default", "reduce-overhead", "max-autotune"} <= {"default", *torch._inductor.list_mode_options()}


def test_compilation_is_timed_forward_and_backward() -> None:
    assert isinstance(utils.calculate_time_spent()["total_wall_time"], int | float)
