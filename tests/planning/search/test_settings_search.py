"""Plans: the simulated combinations, and the choice of the fastest that fits."""

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader
from hf_memopt.planning import Lever, NothingFitsError, Row, SettingsPlan, plan
from hf_memopt.planning.cards.gpus import Card, allowances
from hf_memopt.planning.cards.memory_below import MemoryBelow
from hf_memopt.planning.estimate_report import Verdict
from hf_memopt.planning.search.search import _Search
from hf_memopt.planning.search.table import explain
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.units import GIB, MIB

KEPT = sum(allowances().values())
WIDTH, DEPTH = 256, 6


class Stack(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class Toy:
    """A workload of 16 samples of 1024 rows each: 1 MiB per sample and tensor."""

    name = "toy"
    effective_batch = 16
    tokens_per_sample = None
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16)

    def __init__(self, *levers: Lever) -> None:
        self.levers = levers or (Lever("activations", ("on the device", "checkpointed", "offloaded")),)
        self.simulations: list[tuple[str, int]] = []

    def simulated(self, settings: Mapping[str, Any], micro_batch: int) -> SimulatedStep:
        self.simulations.append((settings["activations"], micro_batch))
        num_micro_batches = min(2, self.effective_batch // micro_batch)

        def setup(device: torch.device) -> Any:
            with device:
                model = Stack(settings["activations"] == "checkpointed")
                batch = torch.zeros(micro_batch * 1024, WIDTH)
            offloader = None
            if settings["activations"] == "offloaded":
                offloader = ActivationOffloader(mode="all", offload_threshold_mb=0.5)
            return model, torch.optim.SGD(model.parameters(), lr=0.1), batch, [offloader]

        def step(state: Any) -> None:
            model, optimizer, batch, (offloader,) = state
            for _ in range(num_micro_batches):
                with offloader.offload_context(model) if offloader else contextlib.nullcontext():
                    loss = model(batch).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return SimulatedStep(setup, step, num_micro_batches=num_micro_batches)

    def write(self, settings: Mapping[str, Any], micro_batch: int, folder: Path) -> list[Path]:
        raise NotImplementedError

    def command(self, written: list[Path]) -> str:
        raise NotImplementedError


class TwoLevers(Toy):
    """Blocks that may be checkpointed, and weights that an optimizer with momentum updates, or one without."""

    def __init__(self) -> None:
        super().__init__(
            Lever("activations", ("on the device", "checkpointed", "offloaded")), Lever("momentum", (0.9, 0.0, "none"))
        )

    def simulated(self, settings: Mapping[str, Any], micro_batch: int) -> SimulatedStep:
        if settings["momentum"] == "none":
            raise ValueError("momentum='none' is not a number")
        plain = super().simulated(settings, micro_batch)

        def setup(device: torch.device) -> Any:
            model, _, batch, offloader = plain.setup(device)
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=settings["momentum"]), batch, offloader

        return replace(plain, setup=setup)


def card_with(room_bytes: int) -> Card:
    """Return a card whose allocator may have `room_bytes`."""
    return Card("test", KEPT + room_bytes, 10e12, 20e12, 500e9, 25e9)


def make_plan(room_bytes: int, **options: Any) -> SettingsPlan:
    return plan(Toy(), gpu=card_with(room_bytes), num_workers=1, progress=False, **options)


@pytest.fixture(scope="module")
def tight() -> SettingsPlan:
    """Plan for a card on which the whole batch does not fit as it is."""
    return make_plan(100 * MIB)


def test_plain_training_is_chosen_where_it_fits_and_nothing_else_is_simulated() -> None:
    roomy = make_plan(2 * GIB)
    assert (roomy.best.settings, roomy.best.micro_batch) == ({"activations": "on the device"}, 16)
    assert {row.settings["activations"] for row in roomy.rows} == {"on the device"}
    assert "not needed, since the whole batch fits without it" in "\n".join(explain(roomy))


def test_nothing_else_is_simulated_where_the_one_micro_batch_that_may_be_chosen_fits() -> None:
    toy = Toy()
    toy.micro_batches = (4,)
    roomy = plan(toy, gpu=card_with(2 * GIB), num_workers=1, progress=False)
    assert [(row.settings["activations"], row.accumulation) for row in roomy.rows] == [("on the device", 4)]
    reasons = explain(roomy)
    assert reasons[0] == "micro-batch 4: as given."
    assert "activations on the device, not offloaded: not needed, since the micro-batch fits without it." in reasons


def test_the_choice_fits_the_modelled_allocator_and_what_is_faster_does_not(tight: SettingsPlan) -> None:
    best = tight.best
    assert best.estimate.trace.fits(100 * MIB)
    for row in tight.rows:
        assert row.fits == row.estimate.trace.fits(100 * MIB)
        assert row.fits == (row.needed_bytes <= KEPT + 100 * MIB)
        if 1.02 * row.update_ms < best.update_ms:
            assert not row.fits


def test_all_combinations_are_compared_on_a_card_that_is_too_small_for_plain_training(tight: SettingsPlan) -> None:
    assert {row.settings["activations"] for row in tight.rows} == {"on the device", "checkpointed", "offloaded"}


@pytest.mark.e2e
@pytest.mark.parametrize("room_mib", [40, 60, 80, 200])
@pytest.mark.sweep(share=0.25)
def test_no_combination_is_faster_than_the_choice(room_mib: int) -> None:
    card = card_with(room_mib * MIB)
    found = plan(TwoLevers(), gpu=card, num_workers=1, progress=False)
    search = _Search(TwoLevers(), TwoLevers().levers, card, MemoryBelow())
    combinations = itertools.product(("on the device", "checkpointed", "offloaded"), (0.9, 0.0))
    rows = run_isolated(
        lambda: [
            row
            for activations, momentum in combinations
            for row in search.explore({"activations": activations, "momentum": momentum})
        ]
    )
    assert found.best.update_ms <= 1.02 * min(row.update_ms for row in rows if row.fits)
    assert found.impossible == {frozenset({("momentum", "none")}): "momentum='none' is not a number"}


class Refusing(TwoLevers):
    def simulated(self, settings: Mapping[str, Any], micro_batch: int) -> SimulatedStep:
        if (settings["activations"], settings["momentum"]) == ("checkpointed", 0.0):
            raise ValueError("not both")
        return super().simulated(settings, micro_batch)


def test_of_values_that_do_not_go_together_the_fewest_are_noted() -> None:
    levers = (*TwoLevers().levers, Lever("third", ("a", "b")))
    search = _Search(Refusing(), levers, card_with(60 * MIB), MemoryBelow())
    plain = {lever.name: lever.values[0] for lever in levers}
    refused = {"activations": "checkpointed", "momentum": 0.0, "third": "b"}
    assert search._go_together({**plain, "third": "b"})
    assert not search._go_together(refused)
    assert search.impossible == {frozenset({("activations", "checkpointed"), ("momentum", 0.0)}): "not both"}
    assert search._is_excluded({**refused, "third": "a"})


def test_the_choice_gives_up_as_little_as_one_that_is_as_fast() -> None:
    found = plan(TwoLevers(), gpu=card_with(100 * MIB), num_workers=1, progress=False)
    assert found.best.settings["momentum"] == 0.9
    reasons = explain(found)
    assert "momentum none is not possible here: momentum='none' is not a number" in reasons


@pytest.mark.parametrize(("nearly", "tried"), [(4, {1, 4}), (8, {1, 2, 4, 8})], ids=["far too large", "only just"])
def test_what_micro_batches_need_tells_which_is_tried_next(nearly: int, tried: set[int]) -> None:
    kept = Lever("activations", ("on the device",))
    alone = Toy(kept)
    alone.micro_batches = (nearly,)
    needed = plan(alone, gpu=card_with(2 * GIB), num_workers=1, progress=False).best.needed_bytes
    beside = MIB if nearly == 4 else -MIB
    found = plan(Toy(kept), gpu=card_with(needed - KEPT + beside), num_workers=1, progress=False)
    assert {row.micro_batch for row in found.rows} == tried
    assert found.best.micro_batch == 4


def test_rows_are_sorted_and_an_update_is_always_the_whole_batch(tight: SettingsPlan) -> None:
    keys = [(not row.fits, row.update_ms) for row in tight.rows[1:]]
    assert keys == sorted(keys)
    assert all(row.micro_batch * row.accumulation == 16 for row in tight.rows)


def test_checkpointing_takes_longer_and_needs_less(tight: SettingsPlan) -> None:
    rows = {(row.settings["activations"], row.micro_batch): row for row in tight.rows}
    kept, checkpointed = rows["on the device", 1], rows["checkpointed", 1]
    assert checkpointed.update_ms > kept.update_ms
    assert checkpointed.estimate.peak_bytes < kept.estimate.peak_bytes


def test_offloading_waits_for_a_slow_link_and_is_not_chosen() -> None:
    slow, fast = (_offloaded_ms(bandwidth) for bandwidth in (0.1e9, 25e9))
    assert slow > 3 * fast


def _offloaded_ms(link_bytes_per_s: float) -> float:
    card = replace(card_with(60 * MIB), link_bytes_per_s=link_bytes_per_s)
    found = plan(Toy(Lever("activations", ("offloaded",))), gpu=card, num_workers=1, progress=False)
    return min(row.update_ms for row in found.rows)


def test_what_the_host_has_no_room_for_stays_on_the_card() -> None:
    rich, poor = (_offloaded(host) for host in (None, "16MiB"))
    assert poor.estimate.host_bytes <= 16 * MIB < rich.estimate.host_bytes
    assert poor.fits
    assert poor.micro_batch < rich.micro_batch


def test_a_disk_takes_what_the_host_has_no_room_for_at_its_speed() -> None:
    fast, slow = (_on_disk(f"1GiB@{speed}") for speed in ("100GBps", "10MBps"))
    assert fast.fits
    assert fast.estimate.disk_bytes_written > 0
    assert fast.estimate.host_bytes <= 96 * MIB
    assert slow.update_ms > 10 * fast.update_ms


def _on_disk(disk: str) -> Row:
    toy = Toy(Lever("activations", ("offloaded",)))
    toy.micro_batches = (16,)
    return plan(toy, gpu=card_with(200 * MIB), host="96MiB", disk=disk, num_workers=1, progress=False).best


def _offloaded(host: str | None) -> Row:
    """Return the row of the largest micro-batch that fits with offloading."""
    toy = Toy(Lever("activations", ("offloaded",)))
    found = plan(toy, gpu=card_with(100 * MIB), host=host, num_workers=1, progress=False)
    return max((row for row in found.rows if row.fits), key=lambda row: row.micro_batch)


def test_values_that_read_a_disk_are_tried_where_there_is_one() -> None:
    lever = Lever("activations", ("on the device", "offloaded"), of_disk=("offloaded",))
    for disk, tried in ((None, {"on the device"}), ("1GiB", {"on the device", "offloaded"})):
        toy = Toy(lever)
        toy.micro_batches = (1, 16)
        found = plan(toy, gpu=card_with(100 * MIB), host="1GiB", disk=disk, num_workers=1, progress=False)
        assert {row.settings["activations"] for row in found.rows} == {*found.levers[0].values} == tried


def test_where_nothing_fits_the_error_says_what_would_and_what_takes_the_memory() -> None:
    with pytest.raises(NothingFitsError, match=r"no settings of toy fit\. The smallest need 0\.\d+ GiB") as caught:
        make_plan(4 * MIB)
    smallest = caught.value.smallest
    assert not smallest.fits
    assert smallest.micro_batch == 1
    found = plan(Toy(), gpu=card_with(smallest.needed_bytes - KEPT), num_workers=1, progress=False)
    assert found.best.needed_bytes <= smallest.needed_bytes


def test_several_simulations_at_once_give_the_same_plan(tight: SettingsPlan) -> None:
    parallel = plan(Toy(), gpu=card_with(100 * MIB), num_workers=3, progress=False)
    assert _key(parallel.best) == _key(tight.best)


def _key(row: Row) -> tuple[Any, ...]:
    return row.settings["activations"], row.micro_batch, row.update_ms, row.needed_bytes, row.fits


def test_an_error_in_a_simulation_reaches_the_caller() -> None:
    class Broken(Toy):
        def simulated(self, settings: Mapping[str, Any], micro_batch: int) -> SimulatedStep:
            def setup(device: torch.device) -> Any:
                raise ValueError("layers=0 must be at least 1")

            return SimulatedStep(setup, lambda state: None)

    with pytest.raises(ValueError, match="layers=0 must be at least 1"):
        plan(Broken(), gpu="8GiB", num_workers=1, progress=False)


def test_a_card_smaller_than_what_it_keeps_for_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gpu='256MiB': .* kept for the device context"):
        plan(Toy(), gpu="256MiB", num_workers=1, progress=False)


@pytest.mark.slow
def test_the_choice_has_its_next_micro_batch_simulated_or_none_that_could_fit() -> None:
    for room_mib in (40, 60, 100):
        found = plan(TwoLevers(), gpu=card_with(room_mib * MIB), num_workers=1, progress=False)
        assert (
            any(row.settings == found.best.settings and row.micro_batch > found.best.micro_batch for row in found.rows)
            or "larger ones exceed the card's memory by far, or save no time" in explain(found)[0]
        )


def test_larger_micro_batches_are_worth_a_simulation_only_where_passes_wait_or_the_plain_run_gains_by_them() -> None:
    toy = Toy()
    search = _Search(toy, toy.levers, card_with(2 * GIB), MemoryBelow())
    plain, other = ({"activations": name} for name in ("on the device", "checkpointed"))

    def row(settings: Mapping[str, Any], micro_batch: int, update_ms: float, stall_ms: float = 0.0) -> Row:
        estimate: Any = None
        return Row(settings, micro_batch, 16 // micro_batch, update_ms, 0, Verdict.FITS, estimate, stall_ms)

    assert search._may_save(row(other, 1, 100.0))  # nothing is known of the plain run yet
    search._rows = [row(plain, 1, 100.0), row(plain, 16, 99.0)]
    assert search._may_save(row(plain, 1, 100.0))
    assert not search._may_save(row(other, 1, 100.0, stall_ms=1.0))
    assert search._may_save(row(other, 1, 100.0, stall_ms=4.0))
    search._rows[1] = row(plain, 16, 90.0)
    assert search._may_save(row(other, 1, 100.0))
