"""The snapshot of a simulated step, as torch's own tools read it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from hf_memopt.planning import MemoryEstimate
from hf_memopt.planning.memory_snapshot import memory_snapshot, write_snapshot


@pytest.fixture(scope="module")
def snapshot(estimated: MemoryEstimate) -> dict[str, Any]:
    return memory_snapshot(estimated)


def test_memory_over_time_is_the_estimates(estimated: MemoryEstimate, snapshot: dict[str, Any]) -> None:
    live: dict[int, int] = {}
    held, in_steps = [], False
    for event in snapshot["device_traces"][0]:
        in_steps |= event["action"] == "snapshot"
        if event["action"] == "alloc":
            assert all(
                event["addr"] + event["size"] <= start or start + size <= event["addr"] for start, size in live.items()
            )
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
        if in_steps:
            held.append(sum(live.values()))
    # The difference is the unused ends of blocks.
    assert max(held) == estimated.peak_bytes - estimated.breakdown.get("unused ends of blocks", 0)


def test_blocks_lie_in_segments_that_hold_what_is_reserved(estimated: MemoryEstimate, snapshot: dict[str, Any]) -> None:
    segments = snapshot["segments"]
    assert sum(each["total_size"] for each in segments) == estimated.reserved_bytes
    assert all(sum(block["size"] for block in each["blocks"]) == each["total_size"] for each in segments)
    ends = [(each["address"], each["address"] + each["total_size"]) for each in segments]
    events = [event for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    assert all(any(a <= event["addr"] and event["addr"] + event["size"] <= b for a, b in ends) for event in events)
    alive = sum(block["size"] for each in segments for block in each["blocks"] if block["state"] == "active_allocated")
    assert alive == sum(estimated.trace.changes) > 0


def test_each_storage_says_who_made_it_and_what_for(estimated: MemoryEstimate, snapshot: dict[str, Any]) -> None:
    stacks = {tuple((each["filename"], each["name"]) for each in event["frames"]) for event in _allocated(snapshot)}
    found = {stack for stack in stacks if stack[1] == ("activations", "forward")}
    assert found
    assert all(module.split(".")[0] in {"0", "1", "2", "Sequential", "forward"} for ((module, _), _) in found)
    kinds = {event["category"] for event in _allocated(snapshot)}
    assert {"parameters", "gradients", "activations", "optimizer state"} <= kinds
    # The viewer needs this kind beside our own kinds.
    assert "unknown" in {event.get("category") for event in snapshot["device_traces"][0]}


def test_torchs_tools_read_the_file(estimated: MemoryEstimate, tmp_path: Path) -> None:
    data = pickle.loads(write_snapshot(estimated, tmp_path / "step.pickle").read_bytes())
    assert "segments: " in _memory_viz.segsum(data)
    assert "cudaMalloc(" in _memory_viz.trace(data)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(data)
    with pytest.raises(ValueError, match="there is no folder"):
        write_snapshot(estimated, tmp_path / "missing" / "step.pickle")


def _allocated(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
