"""Tests that orders of reloading are learned, for the newest shapes only."""

from hf_memopt.activations.saved_tensors import device_state
from hf_memopt.activations.saved_tensors.device_state import ReloadOrders


def sizes_of(shape: int) -> dict[int, int]:
    return {0: shape, 1: 10, 2: 20}


def test_orders_are_learned_for_each_shape() -> None:
    orders = ReloadOrders()
    orders.learn(sizes_of(1), [1, 0, 2])
    assert orders.order(sizes_of(1)).indices == [1, 0, 2]
    assert orders.order(sizes_of(1)).positions == {1: 0, 0: 1, 2: 2}
    assert orders.order(sizes_of(1)).bytes_before == [0, 10, 11, 31]
    assert orders.order(sizes_of(2)).indices == [2, 1, 0]  # the reverse of saving before an order is learned


def test_shapes_that_never_come_again_are_forgotten() -> None:
    orders = ReloadOrders()
    orders.learn(sizes_of(0), [1, 0, 2])
    for shape in range(1, 3 * device_state._NUM_ORDERS):
        orders.learn(sizes_of(shape), [1, 2, 0])
        orders.learn(sizes_of(0), [1, 0, 2])  # a shape that comes again
    assert len(orders._orders) == device_state._NUM_ORDERS
    assert orders.order(sizes_of(0)).indices == [1, 0, 2]
    assert orders.order(sizes_of(1)).indices == [2, 1, 0]
