import math

import torch
from torch import nn

from hf_memopt.training.finite_check import GradientWatch


def test_findings_name_the_micro_batch_and_the_parameters() -> None:
    model = nn.Linear(3, 2)
    watch = GradientWatch(model)
    for factor in (1.0, math.inf, 1.0):
        model(torch.ones(1, 3)).sum().mul(factor).backward()
        watch.end_micro_batch()
    ((number, names),) = watch.findings()
    assert number == 2
    assert sorted(names) == ["bias", "weight"]
    watch.begin_step()
    assert watch.findings() == []
    watch.remove()
    model(torch.ones(1, 3)).sum().mul(math.nan).backward()
    watch.end_micro_batch()
    assert watch.findings() == []
