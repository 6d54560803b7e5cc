"""Plans name each batch once, and refuse what cannot be a plan."""

import pytest
from late_imports import LateModule

coupling_toys = LateModule("coupling_toys")
coupling_plan = LateModule("hf_memopt.couplings.coupling_plan")
source = LateModule("hf_memopt.couplings.source")
writer = LateModule("hf_memopt.couplings.writer")


def test_batches_hold_each_sample_once_for_each_draw() -> None:
    plan = coupling_toys.make_plan(num_draws=2, batch_size=4)
    batches = [plan.batch(number) for number in range(plan.num_batches)]
    for draw in (0, 1):
        assert sorted(i for indices, which in batches if which == draw for i in indices) == sorted(plan.indices)
    assert len({seed for number in range(plan.num_batches) for seed in plan.seeds(number)}) == 2 * len(plan.indices)


def test_unusable_plans_are_refused() -> None:
    plan = coupling_toys.make_plan()
    for changes, message in (
        ({"num_draws": 0}, "num_draws=0 must be"),
        ({"batch_size": 0}, "batch_size=0 must be"),
        ({"indices": [1, 1]}, "each once"),
        ({"indices": []}, "at least one sample"),
    ):
        with pytest.raises(ValueError, match=message):
            coupling_plan.CouplingPlan(**{**vars(plan), **changes})
    with pytest.raises(ValueError, match="shard_size=0 must be"):
        writer.precompute(coupling_toys.Teacher(), coupling_toys.load, plan, "never", shard_size=0)
    with pytest.raises(ValueError, match="too few for 9 ranks"):
        source.CouplingSource.online(coupling_toys.Teacher(), coupling_toys.load, plan, world_size=9)
    with pytest.raises(ValueError, match="rank=2 must be"):
        source.CouplingSource.online(coupling_toys.Teacher(), coupling_toys.load, plan, rank=2, world_size=2)
