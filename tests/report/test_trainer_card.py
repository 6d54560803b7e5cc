from typing import Any

import pytest

from hf_memopt.report.tables import training_facts, training_section

FACTS: dict[str, Any] = {
    "device": "NVIDIA H200",
    "update": "4 x 2 samples on each of 2 devices",
    "seconds_per_batch": 1.2345,
}
ON_A_GPU = [
    {"step": 10, "memory/peak_allocated_gib": 7.0, "memory/reserved_gib": 9.5, "memory/host_rss_gib": 3.0},
    {
        "step": 20,
        "memory/peak_allocated_gib": 7.25,
        "memory/reserved_gib": 9.0,
        "memory/host_rss_gib": 3.0,
        "memory/forward_peak_gib": 6.0,
        "memory/backward_peak_at_least_gib": 7.25,
        "memory/backward_peak_at_most_gib": 7.5,
    },
    {"step": 20, "train_runtime": 3.0},
]


def test_the_highest_of_all_logged_figures_counts_and_its_phase_is_named() -> None:
    facts = training_facts(ON_A_GPU, **FACTS)
    assert facts is not None
    section = training_section(facts)
    assert "| peak memory | 7.25 GiB allocated, in backward; 9.50 GiB reserved |" in section
    assert "| time | 1.23 s for each" in section
    assert "| update | 4 x 2 samples on each of 2 devices |" in section


def test_without_phases_none_is_named() -> None:
    facts = training_facts(ON_A_GPU[:1], **FACTS)
    assert facts is not None
    assert facts["peak memory"] == "7.00 GiB allocated; 9.50 GiB reserved"


@pytest.mark.parametrize("history", [[], [{"step": 1, "loss": 2.0}]])
def test_without_memory_figures_there_are_no_facts(history: list[dict[str, float]]) -> None:
    assert training_facts(history, **FACTS) is None
