from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_imports import LateModule

coupling_toys = LateModule("coupling_toys")
coupling_spec = LateModule("hf_memopt.lerobot.couplings.cache")
writer = LateModule("hf_memopt.lerobot.couplings.cache")


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


def test_a_row_of_noise_depends_on_its_seed_alone() -> None:
    state = torch.get_rng_state()
    together = coupling_spec.draw_noise([3, 4], (2, 5))
    assert together.shape == (2, 2, 5)
    assert torch.equal(coupling_spec.draw_noise([4], (2, 5))[0], together[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_each_field_that_differs_is_named() -> None:
    with pytest.raises(ValueError, match=r"num_steps is 4 there and 5 here; seed is None there and 1 here"):
        coupling_spec.check_same(
            Path("cache"), {"num_steps": 4, "solver": "euler"}, {"num_steps": 5, "seed": 1, "solver": "euler"}
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_checksum_changes_with_any_bit_and_with_the_order(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]))
    values = torch.arange(1, 13).to(dtype).reshape(2, 2, 3)
    before = coupling_spec.observation_checksums({"a": values, "b": values > 3})
    flat = values[1].flatten().view(torch.uint8)
    flat[data.draw(st.integers(0, flat.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    after = coupling_spec.observation_checksums({"a": values, "b": torch.arange(1, 13).reshape(2, 2, 3) > 3})
    assert after[0] == before[0]
    assert after[1] != before[1]
    mirrored = coupling_spec.observation_checksums({"a": torch.arange(1, 13).to(dtype).reshape(2, 2, 3).flip(2)})
    assert (
        mirrored != coupling_spec.observation_checksums({"a": torch.arange(1, 13).to(dtype).reshape(2, 2, 3)})
    ).all()


def test_a_checksum_ignores_padding_and_neighbours() -> None:
    tokens = torch.tensor([[5, 7, 9], [5, 7, 0]])
    sums = coupling_spec.observation_checksums({"tokens": tokens})
    assert sums[0] != sums[1]
    assert coupling_spec.observation_checksums({"tokens": tokens[1:, :2]})[0] == sums[1]
