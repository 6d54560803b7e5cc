import torch

from hf_memopt.planning.accounting.allocation_log import AllocationHistory, Change, StorageRecord


def record(num_bytes: int, born: int, died: int | None, on_host: bool = False) -> StorageRecord:
    return StorageRecord(
        num_bytes=num_bytes,
        requested_bytes=num_bytes,
        on_host=on_host,
        shape=(num_bytes,),
        dtype=torch.uint8,
        operation="aten.empty",
        owner="",
        phase="forward",
        kind="",
        born=born,
        died=died,
    )


def test_device_and_host_memory_are_told_apart() -> None:
    history = AllocationHistory(
        in_blocks=False,
        records=[record(7, 0, None), record(100, 1, 3, on_host=True), record(5, 2, None)],
        changes=[
            Change(0, 7, "setup", ""),
            Change(1, 100, "setup", ""),
            Change(2, 5, "forward", "layer"),
            Change(1, -100, "forward", "layer"),
        ],
        backwards=[3],
        step_begins=[2],
    )
    trace = history.trace()
    assert (trace.changes, trace.storages, trace.positions) == ((7, 5), (0, 2), (0, 2))
    assert trace.first_step == 1
    assert trace.peak() == (12, 1)
    assert history.host_peak_bytes() == 100
    history.step_begins = [3]
    assert history.host_peak_bytes() == 0
    assert (history.next_backward(2), history.next_backward(3), history.position) == (3, None, 4)
