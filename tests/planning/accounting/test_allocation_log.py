import torch
from torch import nn

from hf_memopt.planning.accounting.allocation_log import BACKWARD, FORWARD, OUTSIDE, AllocationLog, StepPhases


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


def test_a_storage_that_the_program_empties_is_dead_until_it_is_filled() -> None:
    log = AllocationLog("cpu", 512, StepPhases())
    with log, log.following_resizes():
        tensor = torch.zeros(256)
        log.label([tensor], "weights", "owner")
        for num_bytes in (0, 0, 2048, 1000):
            tensor.untyped_storage().resize_(num_bytes)
        assert log.record_of(tensor) is log.history.records[1]
        del tensor
    assert [change.num_bytes for change in log.history.changes] == [1024, -1024, 2048, -1024, -1024]
    first, second = log.history.records
    assert (first.born, first.died, second.born, second.died) == (0, 1, 2, 4)
    assert (second.kind, second.owner, second.requested_bytes) == ("weights", "owner", 1000)


def test_phases_follow_modules_and_backward() -> None:
    phases, module = StepPhases(), nn.Linear(2, 2)
    phases.add_root(module, "student")
    phases.begin_step()
    names = []
    log = AllocationLog("cpu", 1, phases, lambda operation, phase: names.append(phase))
    with log:
        phases.enter(module)
        assert phases.module == "student"
        loss = module(torch.ones(1, 2)).sum()
        phases.leave()
        loss.backward()
        torch.zeros(1)
    assert list(dict.fromkeys(names)) == [FORWARD, BACKWARD, OUTSIDE]
    assert log.history.next_backward(0) is not None
