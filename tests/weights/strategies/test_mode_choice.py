import pytest

from hf_memopt.weights.strategies.auto import choose

MEASURED = {
    "capacity_bytes": 1000,
    "outside_bytes": 800,
    "inside_bytes": 300,
    "weights_bytes": 100,
    "stream_bytes": 20,
    "stream_visit_bytes": 90,
    "bytes_per_s": 1000.0,
    "visit_s": 0.05,
}


@pytest.mark.parametrize(
    ("changes", "mode", "stall_ms"),
    [
        ({}, "resident", 0),
        ({"weights_bytes": 150}, "resident", 0),
        ({"weights_bytes": 151}, "swap", 151),
        ({"weights_bytes": 650}, "swap", 650),
        ({"weights_bytes": 651}, "stream", 40),
        ({"weights_bytes": 651, "visit_s": 0.1}, "stream", 0),
        ({"inside_bytes": 900}, "stream", 40),
    ],
)
def test_the_rule(changes: dict[str, float], mode: str, stall_ms: float) -> None:
    measured = MEASURED | changes
    choice = choose(**measured)
    assert (choice.mode, round(choice.predicted_stall_ms)) == (mode, stall_ms)
    assert choice.predicted_device_bytes == (20 if mode == "stream" else measured["weights_bytes"])
