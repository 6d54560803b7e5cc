import pytest
from late_imports import LateModule

coupling_toys = LateModule("coupling_toys")
coupling_spec = LateModule("hf_memopt.lerobot.couplings.coupling_spec")
writer = LateModule("hf_memopt.lerobot.couplings.writer")


def test_batches_hold_each_sample_once_for_each_draw() -> None:
    spec = coupling_toys.make_spec(num_draws=2, batch_size=4)
    batches = [spec.batch(number) for number in range(spec.num_batches)]
    for draw in (0, 1):
        assert sorted(i for indices, which in batches if which == draw for i in indices) == sorted(spec.indices)
    assert len({seed for number in range(spec.num_batches) for seed in spec.seeds(number)}) == 2 * len(spec.indices)


def test_unusable_plans_are_refused() -> None:
    spec = coupling_toys.make_spec()
    for changes, message in (
        ({"num_draws": 0}, "num_draws=0 must be"),
        ({"batch_size": 0}, "batch_size=0 must be"),
        ({"indices": [1, 1]}, "each once"),
        ({"indices": []}, "at least one sample"),
    ):
        with pytest.raises(ValueError, match=message):
            coupling_spec.CouplingSpec(**{**vars(spec), **changes})
    with pytest.raises(ValueError, match="shard_size=0 must be"):
        writer.precompute(coupling_toys.Teacher(), coupling_toys.load, spec, "never", shard_size=0)
