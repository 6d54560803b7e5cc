"""A simulated step as a memory snapshot, as `torch.cuda.memory._dump_snapshot` writes one of a real step.

https://pytorch.org/memory_viz and `python -m torch.cuda._memory_viz` open it: every storage in its block, with the
module and the operation that made it, in the order in which a model of CUDA's allocator places them.
"""

import pickle
from bisect import bisect_right
from pathlib import Path
from typing import Any

from hf_memopt.command_line import check_output_file
from hf_memopt.planning.accounting.caching_allocator import CachingAllocator
from hf_memopt.planning.estimate_report import MemoryEstimate

# The end of the device's memory; the allocator takes it from above.
_END = 1 << 46


def write_snapshot(estimate: MemoryEstimate, path: Path) -> Path:
    check_output_file("snapshot", path)
    path.write_bytes(pickle.dumps(memory_snapshot(estimate)))
    return path


def memory_snapshot(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return the snapshot as torch's own tools read it, of one device, with the segments at the end."""
    trace, allocator = estimate.trace, CachingAllocator()
    events: list[dict[str, Any]] = []
    segments: list[dict[str, Any]] = []
    live: dict[int, dict[str, Any]] = {}
    reserved_bytes = 0
    for index, (num_bytes, block) in enumerate(trace.placed_by(allocator)):
        storage = trace.storages[index]
        if index == trace.first_step:
            # The viewer needs one of this category, and passes by entries that are no allocation.
            events.append({"action": "snapshot", "stream": 0, "frames": [], "category": "unknown"})
        if storage in live:
            born = live.pop(storage)
            events += [{**born, "action": action} for action in ("free_requested", "free_completed")]
        if block is not None:
            frames = _frames(estimate, storage, trace.phases[index])
            if grown_bytes := allocator.reserved_bytes - reserved_bytes:
                event = {"addr": _END + allocator.lowest_address, "size": grown_bytes, "stream": 0, "frames": frames}
                events.append({**event, "action": "segment_alloc"})
                segments.append(event)
                reserved_bytes = allocator.reserved_bytes
            born = {"addr": _END + block.address, "size": num_bytes, "stream": 0, "frames": frames}
            born["category"] = estimate.storage_kinds[storage]
            events.append({**born, "action": "alloc"})
            live[storage] = born
    return {"device_traces": [events], "segments": _segments(segments, list(live.values()))}


def _frames(estimate: MemoryEstimate, storage: int, phase: str) -> list[dict[str, Any]]:
    """Stand in for a stack: the module that was running and the operation, then the use of the storage."""
    owner, operation = estimate.storage_makers[storage]
    return [
        {"filename": owner or phase, "line": 0, "name": operation or "-"},
        {"filename": estimate.storage_kinds[storage], "line": 0, "name": phase},
    ]


def _segments(segments: list[dict[str, Any]], born: list[dict[str, Any]]) -> list[dict[str, Any]]:
    segments = sorted(segments, key=lambda each: int(each["addr"]))
    begins = [segment["addr"] for segment in segments]
    blocks: list[list[dict[str, Any]]] = [[] for _ in segments]
    for event in sorted(born, key=lambda each: int(each["addr"])):
        blocks[bisect_right(begins, event["addr"]) - 1].append(event)
    return [_segment(segment, inside) for segment, inside in zip(segments, blocks, strict=True)]


def _segment(segment: dict[str, Any], inside: list[dict[str, Any]]) -> dict[str, Any]:
    blocks, position = [], segment["addr"]
    for event in inside:
        if event["addr"] > position:
            blocks.append({"size": event["addr"] - position, "state": "inactive", "frames": [], "requested_size": 0})
        same = {"size": event["size"], "requested_size": event["size"], "frames": event["frames"]}
        blocks.append({**same, "state": "active_allocated"})
        position = event["addr"] + event["size"]
    rest = segment["addr"] + segment["size"] - position
    if rest:
        blocks.append({"size": rest, "state": "inactive", "frames": [], "requested_size": 0})
    used = sum(event["size"] for event in inside)
    return {
        "device": 0,
        "address": segment["addr"],
        "total_size": segment["size"],
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large" if segment["size"] > 2 << 20 else "small",
        "is_expandable": False,
        "frames": segment["frames"],
        "blocks": blocks,
    }
