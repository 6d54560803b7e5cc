"""The log of storages, with real tensors on the CPU."""

import torch
from torch import nn

from hf_memopt.estimate.accounting.allocation_log import BACKWARD, FORWARD, OUTSIDE, AllocationLog, StepPhases


def test_storages_are_born_once_shrink_and_die() -> None:
    log = AllocationLog("cpu", 512, StepPhases())
    with log:
        tensor = torch.zeros(1000)
        view = tensor[10:]
        assert log.record_of(view) is log.record_of(tensor)
        tensor.untyped_storage().resize_(400)
        tensor.add_(0, alpha=0) if tensor.numel() == 100 else torch.zeros_like(tensor[:100])
        del tensor, view
    assert [change.num_bytes for change in log.history.changes[:1]] == [4096]
    assert sum(change.num_bytes for change in log.history.changes) == 0
    assert all(record.died is not None for record in log.history.records)


def test_phases_follow_modules_and_backward() -> None:
    phases, module = StepPhases(), nn.Linear(2, 2)
    phases.add_root(module, "student")
    phases.begin_step()
    names = []
    log = AllocationLog("cpu", 1, phases, lambda function, args, kwargs, result, phase: names.append(phase))
    with log:
        phases.enter(module)
        assert phases.module == "student"
        loss = module(torch.ones(1, 2)).sum()
        phases.leave()
        loss.backward()
        torch.zeros(1)
    assert list(dict.fromkeys(names)) == [FORWARD, BACKWARD, OUTSIDE]
    assert log.history.next_backward(0) is not None
