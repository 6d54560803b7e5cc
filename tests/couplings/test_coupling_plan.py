"""Plans name each batch once, and refuse what cannot be a plan."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def heavy_imports() -> None:
    """Import these when the first test runs: collecting tests must not cost their seconds."""
    global CouplingPlan, CouplingSource, load, make_plan, precompute, Teacher
    from coupling_toys import Teacher, load, make_plan

    from hf_memopt.couplings.coupling_plan import CouplingPlan
    from hf_memopt.couplings.source import CouplingSource
    from hf_memopt.couplings.writer import precompute


def test_batches_hold_each_sample_once_for_each_draw() -> None:
    plan = make_plan(num_draws=2, batch_size=4)
    batches = [plan.batch(number) for number in range(plan.num_batches)]
    for draw in (0, 1):
        assert sorted(i for indices, which in batches if which == draw for i in indices) == sorted(plan.indices)
    assert len({seed for number in range(plan.num_batches) for seed in plan.seeds(number)}) == 2 * len(plan.indices)


def test_unusable_plans_are_refused() -> None:
    plan = make_plan()
    for changes, message in (
        ({"num_draws": 0}, "num_draws=0 must be"),
        ({"batch_size": 0}, "batch_size=0 must be"),
        ({"indices": [1, 1]}, "each once"),
        ({"indices": []}, "at least one sample"),
    ):
        with pytest.raises(ValueError, match=message):
            CouplingPlan(**{**vars(plan), **changes})
    with pytest.raises(ValueError, match="shard_size=0 must be"):
        precompute(Teacher(), load, plan, "never", shard_size=0)
    with pytest.raises(ValueError, match="too few for 9 ranks"):
        CouplingSource.online(Teacher(), load, plan, world_size=9)
    with pytest.raises(ValueError, match="rank=2 must be"):
        CouplingSource.online(Teacher(), load, plan, rank=2, world_size=2)
