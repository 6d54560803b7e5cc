import torch
from torch import nn

from hf_memopt.planning.accounting import categories
from hf_memopt.planning.accounting.allocation_log import AllocationLog, StepPhases
from hf_memopt.planning.accounting.categories import StepLabels


def test_what_modules_and_optimizers_own_is_labelled_and_the_rest_follows_from_backward() -> None:
    phases = StepPhases()
    log = AllocationLog("cpu", 1, phases)
    labels = StepLabels(log)
    with log, labels.following():
        model, batch = nn.Linear(4, 4, bias=False), torch.ones(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        labels.add_state([model, {"batch": batch}])
        labels.add([teacher := torch.empty(5, dtype=torch.uint8)], categories.TEACHER)
        phases.begin_step()
        saved = model(batch).exp()
        at_forward = log.history.position - 1
        saved.sum().backward()
        optimizer.step()
        found, before = (
            categories.breakdown(live, sum(record.num_bytes for _, record in live) + 100)
            for live in (
                categories.alive_at(log.history, position) for position in (log.history.position - 1, at_forward)
            )
        )
    assert found[categories.UNUSED] == before[categories.UNUSED] == 100
    assert before[categories.ACTIVATION] == 8 * 4 * 4
    assert found[categories.TEACHER] == teacher.nbytes
    assert found[categories.INPUT] == batch.nbytes
    of_weights = (categories.PARAMETER, categories.GRADIENT, categories.OPTIMIZER_STATE)
    assert {found[each] for each in of_weights} == {model.weight.nbytes}
    assert labels.unreached() == ()
