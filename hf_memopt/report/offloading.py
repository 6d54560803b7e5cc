"""The work of an `ActivationOffloader` in a run: in words, and as `offloading.json` in the run's folder."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from hf_memopt.activations import ActivationOffloader, OffloadStats
from hf_memopt.units import GIB, format_bytes, format_ms

OFFLOADING_FILE = "offloading.json"
_MAX_POINTS = 600


@dataclass(frozen=True)
class PlanTable:
    """A plan's one-line summary, and bytes kept, offloaded and recomputed by the kind of module that saves them."""

    summary: str
    rows: list[tuple[str, int, int, int]]


@dataclass(frozen=True)
class HeldOverPass:
    """Bytes of saved activations on the device at saves and uses of the largest pass."""

    held: list[int]
    plain: list[int]  # if all had been kept
    num_forward: int  # the first ones, which belong to the forward pass


@dataclass(frozen=True)
class OffloadingRecord:
    """The cost of a training run, and the work of its offloader."""

    facts: dict[str, str]  # device, peak memory, update and time, as in the model card
    stats: OffloadStats | None  # None where activations were not offloaded
    plans: list[PlanTable]  # the newest ones; none in modes that make none
    note: str  # the reason why there are none
    over_pass: HeldOverPass  # of the largest pass that followed a plan
    weights: list[str]  # frozen weights, and state of optimizers, that lived elsewhere, each in a line

    @classmethod
    def of(
        cls, offloader: ActivationOffloader | None, *, facts: Mapping[str, str], weights: Sequence[str] = ()
    ) -> Self:
        if offloader is None:
            return cls(dict(facts), None, [], "", HeldOverPass([], [], 0), list(weights))
        report, curve = offloader.report(), offloader.curve
        plans = [
            PlanTable(
                each.plan.summary(),
                [(row.owner, row.kept_bytes, row.offloaded_bytes, row.recomputed_bytes) for row in each.rows],
            )
            for each in report.plans
        ]
        shown = highest([note.held for note in curve.notes], _MAX_POINTS)
        over_pass = HeldOverPass(
            [curve.notes[place].held for place in shown],
            [curve.notes[place].plain for place in shown],
            sum(place < curve.num_forward for place in shown),
        )
        return cls(dict(facts), offloader.stats_at_peak, plans, report.note, over_pass, list(weights))

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return the record in a file; ValueError if it is not of this form."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            return cls(
                dict(found["facts"]),
                None if found["stats"] is None else OffloadStats(**found["stats"]),
                [PlanTable(each["summary"], [(a, b, c, d) for a, b, c, d in each["rows"]]) for each in found["plans"]],
                found["note"],
                HeldOverPass(**found["over_pass"]),
                found["weights"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is not as hf_memopt writes it ({error}); remove the file, or train again"
            ) from error

    def write(self, folder: Path) -> None:
        """Write `offloading.json` into a run's folder, over an earlier one."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OFFLOADING_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def in_words(stats: OffloadStats) -> list[str]:
    """Return the work of an offloader in phrases, for a log's line, a page and a model card."""
    recomputed = f", {format_bytes(stats.bytes_recomputed)} computed again" if stats.bytes_recomputed else ""
    destination = "host and disk" if stats.host_bytes_pinned else "the disk"
    held = f"{format_bytes(stats.disk_bytes_held)} of disk used, " if stats.disk_bytes_held else ""
    written = f"{held}{format_bytes(stats.disk_bytes_written)} written to the disk"
    phrases = [
        f"over the run {format_bytes(stats.bytes_kept)} kept, {format_bytes(stats.bytes_moved)} moved to "
        f"{destination if stats.disk_bytes_written else 'the host'}{recomputed}",
        f"{format_bytes(stats.host_bytes_pinned)} of host memory used" if stats.host_bytes_pinned else "",
        written if stats.disk_bytes_written else "",
        f"compute waited {format_ms(stats.stall_ms)}",
        _figures(
            "in a step: peak of saved activations",
            lambda gib: format_bytes(gib * GIB),
            predicted=stats.predicted_peak_gib,
            measured=stats.measured_peak_gib,
            if_all_were_kept=stats.plain_peak_gib,
        ),
        _figures("forward and backward", format_ms, predicted=stats.predicted_step_ms, measured=stats.measured_step_ms),
    ]
    return [phrase for phrase in phrases if phrase]


def highest(held: Sequence[int], max_points: int, first: int = 0) -> list[int]:
    """Return the place of the highest value in each of `max_points` stretches of those from the `first` on."""
    width = max(1, -(-(len(held) - first) // max_points))
    stretches = (range(start, min(start + width, len(held))) for start in range(first, len(held), width))
    return [max(stretch, key=held.__getitem__) for stretch in stretches]


def _figures(name: str, in_unit: Callable[[float], str], **values: float | None) -> str:
    figures = [f"{in_unit(value)} {how.replace('_', ' ')}" for how, value in values.items() if value is not None]
    return f"{name} {', '.join(figures)}" if figures else ""
