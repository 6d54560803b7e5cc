import math
from dataclasses import replace

import pytest
from estimate_runs import mlp_setup, step

from hf_memopt.planning import MemoryEstimate, estimate_peak_memory, estimate_report
from hf_memopt.planning.cards.gpus import find_card, time_range
from hf_memopt.planning.estimate_report import Verdict
from hf_memopt.units import GIB, MIB, format_gib, format_ms


def test_a_peak_in_the_optimizer_is_said_to_be_out_of_reach_of_checkpointing(estimated: MemoryEstimate) -> None:
    assert estimated.phase == "optimizer"
    text = estimated.text()
    assert text.splitlines()[1] == "The peak, 0.02 GiB allocated, is in the optimizer's update."
    assert "checkpointing and offloading cannot lower it" in text.splitlines()[2]


def test_an_estimate_prints_itself(estimated: MemoryEstimate) -> None:
    assert str(estimated) == estimated.text()
    assert len(repr(estimated)) < 5000  # without the trace of every allocation


def test_what_is_needed_decides_whether_it_fits(estimated: MemoryEstimate) -> None:
    needed = estimate_report.needed_bytes(estimated)
    assert needed == estimated.trace.smallest_capacity + 624 * MIB
    error = math.ceil(0.05 * estimated.trace.smallest_capacity)
    judged = {error: Verdict.FITS, error - 1: Verdict.ONLY_JUST, 0: Verdict.ONLY_JUST, -1: Verdict.NO}
    for room, verdict in judged.items():
        card = replace(find_card("8GiB"), memory_bytes=needed + room)
        assert estimated.trace.fits(card.memory_bytes - 624 * MIB) == (room >= 0)
        assert estimate_report.verdict(estimated, card) is verdict
        assert f"It {verdict} on 8GiB" in estimated.text(card)


def test_a_size_alone_has_no_time_and_a_reserve_is_needed(estimated: MemoryEstimate) -> None:
    assert estimate_peak_memory(mlp_setup, step, gpu="24GB").step_ms is None
    assert estimate_peak_memory(mlp_setup, step, gpu="24GB@l4").step_ms is not None
    plain, shared = (
        estimate_report.needed_bytes(estimated, find_card("24GB", reserve=text)) for text in (None, "1GiB")
    )
    assert shared == plain + GIB
    assert "other programs 1024 MiB" in estimated.text(find_card("24GB", reserve="1GiB"))


def test_the_memory_that_nccl_takes_for_itself_may_decide(estimated: MemoryEstimate) -> None:
    several = replace(estimated, num_gpus=8)
    needed = estimate_report.needed_bytes(several)
    enough = 2 * GIB + math.ceil(0.05 * several.trace.smallest_capacity)
    rooms = {0: Verdict.ONLY_JUST, enough - 1: Verdict.ONLY_JUST, enough: Verdict.FITS, -1: Verdict.NO}
    for room, judged in rooms.items():
        assert estimate_report.verdict(several, replace(find_card("8GiB"), memory_bytes=needed + room)) is judged
    text = several.text(replace(find_card("8GiB"), memory_bytes=needed))
    assert text.startswith("It fits only just on 8GiB (0.63 GiB). The step needs 0.63 GiB. NCCL takes 0.5 to 2.0 GiB")


def test_notes_follow_the_verdict(estimated: MemoryEstimate) -> None:
    assert "\n\nNote: mind the gap\n\n" in replace(estimated, notes=("mind the gap",)).text()


def test_one_figure_is_called_needed(estimated: MemoryEstimate) -> None:
    card = find_card("t4")
    text = estimated.text(card)
    assert text.startswith(
        f"It fits on t4 (14.56 GiB). The step needs {format_gib(estimate_report.needed_bytes(estimated, card))}.\n"
    )
    assert estimate_report.as_json(estimated, card)["needed_bytes"] == estimate_report.needed_bytes(estimated, card)


def test_more_passes_take_time_alone() -> None:
    estimated = estimate_peak_memory(mlp_setup, step, gpu="rtx4090")
    longer = estimated.with_passes(8)
    assert longer.step_ms == pytest.approx(
        8 * (estimated.phases_ms["forward"] + estimated.phases_ms["backward"])
        + estimated.phases_ms["between passes"]
        + estimated.phases_ms["optimizer"]
    )
    assert (longer.peak_bytes, longer.phases) == (estimated.peak_bytes, estimated.phases)
    assert longer.step_range_ms[1] / longer.step_ms == pytest.approx(estimated.step_range_ms[1] / estimated.step_ms)


@pytest.mark.parametrize(
    ("gpu", "on_which"),
    [
        ("rtx4090", "on cards of its family, Ampere and Ada,"),
        ("b200", "on cards of other families"),
    ],
)
def test_a_time_has_a_range_that_is_wider_on_cards_like_no_other(gpu: str, on_which: str) -> None:
    card = find_card(gpu)
    estimated = estimate_peak_memory(mlp_setup, step, gpu=card)
    low, high = estimated.step_range_ms
    expected = time_range(card)
    assert (low / estimated.step_ms, high / estimated.step_ms) == pytest.approx(expected)
    assert expected.low < 1 < expected.high
    text = estimated.text(card)
    assert f"Time of a step: {format_ms(estimated.step_ms)} ({format_ms(low)} to {format_ms(high)}: " in text
    assert on_which in text
    assert "without communication" not in text
    assert "without communication" in replace(estimated, num_gpus=2).text(card)
    assert estimate_report.as_json(estimated, card)["step_range_ms"] == (low, high)


def test_an_estimate_without_a_card_has_no_time(estimated: MemoryEstimate) -> None:
    assert "Time of a step" not in estimated.text(find_card("t4"))
    with pytest.raises(ValueError, match="card='t4': the estimate knows no time"):
        estimate_report.time_text(estimated, find_card("t4"))


def test_confidence_says_the_assumptions_and_what_to_do(estimated: MemoryEstimate) -> None:
    assert "Confidence: high, nothing had to be assumed" in estimated.text()
    guessed = replace(estimated, confidence="medium", assumptions=("masks taken to hide nothing (2 times)",))
    *_, confidence, assumed = guessed.text().splitlines()
    assert confidence.endswith("if these assumptions hold; if you doubt one, measure a step")
    assert assumed == "  assumed: masks taken to hide nothing (2 times)"
    partly = replace(estimated, confidence="low", unreached=("head.weight",))
    *_, confidence, unreached = partly.text().splitlines()
    assert confidence.startswith("Confidence: low, part of the model may not have run; see that the batch")
    assert unreached == "  1 trainable parameters got no gradient: head.weight"
    assert estimate_report.as_facts(guessed)["confidence"] in guessed.text()
