from hypothesis import given, settings
from hypothesis import strategies as st

from hf_memopt.weights.streaming.access_trace import Read
from hf_memopt.weights.streaming.copy_schedule import plan_stream


def reads(*names: str) -> list[Read]:
    return [Read((int(name),), f"module {name}") for name in names]


def test_plan_of_a_prefix_and_three_steps() -> None:
    plan = plan_stream(reads(*"012345" + "67" * 3), [10] * 9, {"module 8": (8,)})
    assert [block.slices for block in plan.blocks if block.stays] == []  # 6 and 7 fit the ring together
    plan = plan_stream(reads(*"012" + "3456" * 3), [10] * 9, {"module 8": (8,)})
    assert [block.slices for block in plan.blocks if block.stays] == [(3,), (4,), (5,), (6,)]
    assert (plan.hot_bytes, plan.ring_bytes, plan.visit_bytes) == (40, 20, 70)
    assert [plan.blocks[number].slices for number in plan.needs["module 8"]] == [(8,)]
    plan = plan_stream(reads(*"012" + "3456" * 3), [10] * 9, {}, budget_bytes=40)
    assert plan.hot_bytes == 20
    assert plan.device_bytes == 40


def test_hot_blocks_of_one_loop_are_gone_before_the_next_loop() -> None:
    plan = plan_stream(reads(*"012" * 3 + "9" + "3456" * 3), [10] * 10, {})
    assert (plan.hot_bytes, plan.ring_bytes, plan.visit_bytes) == (40, 20, 80)


def test_reads_that_no_call_announces_arrive_with_the_visit() -> None:
    plan = plan_stream([Read((0,), None), *reads("1", "2"), Read((3,), "module 1", late=True)], [10] * 4, {}, 0)
    assert [plan.blocks[number].slices for number in plan.at_start] == [(0,), (3,)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8).flatmap(
        lambda sizes: st.tuples(
            st.just(sizes), st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=30), st.integers(0, 300)
        )
    )
)
def test_any_plan_holds_each_weight_once_and_keeps_to_its_budget(case: tuple[list[int], list[int], int]) -> None:
    sizes, order, budget = case
    plan = plan_stream([Read((index,), f"module {index}") for index in order], sizes, {}, budget)
    held = sorted(index for block in plan.blocks for index in block.slices)
    assert held == list(range(len(sizes)))
    used = {index for number in plan.sequence for index in plan.blocks[number].slices}
    assert used == set(order)
    largest = max(sizes[index] for index in order)
    assert plan.hot_bytes <= max(0, budget - 2 * largest)
    assert plan.ring_bytes <= 2 * largest
