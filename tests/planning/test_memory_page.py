"""The timeline on the page of a step's memory, which adds up and has the peak."""

from pathlib import Path

import pytest

from hf_memopt.planning import MemoryEstimate, memory_page


def test_the_timeline_adds_up_and_holds_the_peak(estimated: MemoryEstimate) -> None:
    shown = memory_page.timeline(estimated)
    totals = [sum(column) for column in zip(*shown.bytes_by_kind.values(), strict=True)]
    held = estimated.trace.held()
    assert totals == [held[position] for position in shown.positions]
    assert max(totals) == estimated.peak_bytes
    assert shown.positions[0] == shown.spans[0].start == estimated.trace.first_step
    assert [span.phase for span in shown.spans][:4] == ["forward", "backward", "optimizer", "between passes"]
    assert shown.spans[-1].end == len(held)
    assert max(shown.bytes_by_kind["parameters"]) == estimated.breakdown["parameters"]


def test_a_shortened_timeline_holds_the_peak_too(estimated: MemoryEstimate) -> None:
    shown = memory_page.timeline(estimated, max_points=5)
    assert len(shown.positions) <= 5
    totals = [sum(column) for column in zip(*shown.bytes_by_kind.values(), strict=True)]
    assert max(totals) == estimated.peak_bytes


def test_a_timeline_needs_a_folder(estimated: MemoryEstimate, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        memory_page.write_timeline(estimated, "toy", tmp_path / "missing" / "page.html")
