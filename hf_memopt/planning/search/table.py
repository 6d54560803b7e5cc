"""The simulated settings for a card, in words and as a table."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from hf_memopt.planning.cards.gpus import Card, allowances
from hf_memopt.planning.cards.memory_below import Disk
from hf_memopt.planning.estimate_report import MemoryEstimate, Verdict, disk_text, time_text
from hf_memopt.planning.workload import PLACES, Lever, Settings
from hf_memopt.text_table import align
from hf_memopt.units import GIB, MIB, format_gib, format_ms

# Memory over a step in a few parts, by its use: savings meet each other there, and not at the peak.
# A phase and a number within it, and the bytes of each use.
Part = tuple[str, int]
MemoryProfile = Mapping[Part, Mapping[str, int]]
_PARTS_OF_PHASE = 8


@dataclass(frozen=True)
class Row:
    """A candidate, simulated.

    Attributes:
        settings: value of each lever.
        micro_batch: samples per forward pass, on each GPU.
        accumulation: forward passes per update.
        update_ms: predicted time of one update, of `effective_batch` samples; where no card is named it is for
            comparisons between rows alone.
        needed_bytes: the least device memory with which the allocator gets through, allowances included.
        verdict: whether that and the memories of host and disk suffice.
        estimate: estimate of the step.
        stall_ms: the part of `update_ms` in which passes wait for copies.
    """

    settings: Settings
    micro_batch: int
    accumulation: int
    update_ms: float
    needed_bytes: int
    verdict: Verdict
    estimate: MemoryEstimate
    stall_ms: float = 0.0

    @property
    def fits(self) -> bool:
        return self.verdict is not Verdict.NO

    @cached_property
    def profile(self) -> MemoryProfile:
        """Memory in use at the fullest moment of each part of the last run of each phase.

        All parts of a phase have equally many changes.
        """
        trace = self.estimate.trace
        held = trace.held()
        changes = range(trace.first_step, len(held))
        runs = {phase: list(run) for phase, run in groupby(changes, key=trace.phases.__getitem__)}
        moments: dict[Part, int] = {}
        for phase, run in runs.items():
            for number in range(_PARTS_OF_PHASE):
                part = run[number * len(run) // _PARTS_OF_PHASE :][: -(-len(run) // _PARTS_OF_PHASE)]
                moments[phase, number] = max(part, key=held.__getitem__)
        uses = self.estimate.uses_at(set(moments.values()))
        return {part: uses[moment] for part, moment in moments.items()}


# The beginning of a reason that is no refusal.
FAILED = "the simulation failed: "
# Values of levers that do not go together, by name, and why.
Impossible = Mapping[frozenset[tuple[str, Any]], str]


@dataclass(frozen=True)
class SettingsPlan:
    """The simulated settings for a card, and the best of them; `str` gives the choice and the table of all candidates.

    Attributes:
        workload: its name.
        levers: that were tried.
        card: that it must fit.
        host_bytes: part of the host's memory that may be used; None, any.
        disk: takes the storages that the host has no room for; None where there is none.
        rows: all candidates that were simulated, the chosen one first, then those that fit, then by time.
        micro_batches: that may be chosen, the smallest first.
        impossible: values that do not go together.
        tokens_per_sample: None where samples are not made of tokens.
    """

    workload: str
    levers: tuple[Lever, ...]
    card: Card
    host_bytes: int | None
    disk: Disk | None
    rows: tuple[Row, ...]
    micro_batches: tuple[int, ...]
    impossible: Impossible = field(default_factory=dict)
    tokens_per_sample: int | None = None

    @property
    def best(self) -> Row:
        """The fastest that fits."""
        return self.rows[0]

    def __str__(self) -> str:
        failed = "".join(
            f"\n{_named(values)}: {_first_line(reason)}"
            for values, reason in self.impossible.items()
            if reason.startswith(FAILED)
        )
        return f"{headline(self)}\n\n{table(self)}{failed and f'\n{failed}'}"


def table(plan: SettingsPlan) -> str:
    has_disk = any(row.estimate.disk_bytes for row in plan.rows)
    rows = [_cells(row, plan, has_disk) for row in plan.rows]
    heads = list(rows[0])
    rule = ["-" * len(head) for head in heads]
    cells = [heads, rule, *(list(row.values()) for row in rows)]
    # The empty cell gives the bar that closes a row.
    return "\n".join(f"| {line}" for line in align([[*row, ""] for row in cells], separator=" | "))


_WORDS = {Verdict.FITS: "yes", Verdict.ONLY_JUST: "only just", Verdict.NO: "no"}
# Levers and values that are shown by other words than those of flags.
_NAMES = {"base": "frozen weights"}


def _value(row: Row, lever: str) -> str:
    value = str(row.settings[lever])
    return PLACES.get(value, value) if lever in _NAMES else value


def _cells(row: Row, plan: SettingsPlan, has_disk: bool) -> dict[str, str]:
    return {
        "micro-batch": f"{row.micro_batch} x {row.accumulation}",
        **{_NAMES.get(lever.name, lever.name): _value(row, lever.name) for lever in plan.levers},
        "peak GiB": f"{row.estimate.peak_bytes / GIB:.2f}",
        "needs GiB": f"{row.needed_bytes / GIB:.2f}",
        "host GiB": f"{row.estimate.host_bytes / GIB:.2f}",
        **({"disk GiB": f"{row.estimate.disk_bytes / GIB:.2f}"} if has_disk else {}),
        "peaks during": row.estimate.phase,
        "update": format_ms(row.update_ms) if plan.card.is_named else f"{row.update_ms / plan.best.update_ms:.2f} x",
        "fits": _WORDS[row.verdict],
    }


def as_json(plan: SettingsPlan) -> dict[str, Any]:
    return {
        "workload": plan.workload,
        "card": asdict(plan.card),
        "host_bytes": plan.host_bytes,
        "disk": asdict(plan.disk) if plan.disk else None,
        "allowances": allowances(plan.card),
        "rows": [_row_as_json(row, plan) for row in plan.rows],
        "impossible": [{"settings": dict(values), "reason": reason} for values, reason in plan.impossible.items()],
        "tokens_per_sample": plan.tokens_per_sample,
    }


# In a row's JSON, by their names there.
_OF_ESTIMATE = (
    *("peak_bytes", "host_bytes", "disk_bytes", "disk_bytes_written", "disk_tb_per_day"),
    *("phase", "breakdown", "confidence"),
)


def _row_as_json(row: Row, plan: SettingsPlan) -> dict[str, Any]:
    estimate = row.estimate
    return {
        "settings": dict(row.settings),
        **{name: getattr(row, name) for name in ("micro_batch", "accumulation", "verdict")},
        "update_ms": row.update_ms if plan.card.is_named else None,
        "relative_time": row.update_ms / plan.best.update_ms,
        "update_range_ms": estimate.step_range_ms,
        "needed_bytes": row.needed_bytes,
        **{name: getattr(estimate, name) for name in _OF_ESTIMATE},
        "assumptions": list(estimate.assumptions),
    }


def headline(plan: SettingsPlan) -> str:
    best = plan.best
    num_samples = best.micro_batch * best.accumulation * best.estimate.num_gpus
    samples = f"{num_samples} sample{'s' * (num_samples > 1)}"
    on_host = best.estimate.host_bytes
    host = f", and {format_gib(on_host)} of host memory" if on_host >= GIB else ""
    time = "Times are relative: a size has no speed. Name a card, or a size with a card's speed, such as 8GiB@t4."
    if plan.card.is_named:
        time = f"An update of {samples} takes {time_text(best.estimate, plan.card)}."
        if plan.tokens_per_sample is not None:
            per_s = num_samples * plan.tokens_per_sample / best.update_ms * 1e3
            time += f" That is {per_s:,.0f} tokens per second."
    lines = [
        f"Train with {describe(best)}.",
        f"That {best.verdict} on {plan.card.name}: it needs {format_gib(best.needed_bytes)} of "
        f"{plan.card.memory_bytes / GIB:.1f} GiB, most of it during {best.estimate.phase}{host}.",
        f"{plan.workload}.",
        time,
        *(f"Note: {note}" for note in best.estimate.notes),
    ]
    return "\n".join(lines)


def explain(plan: SettingsPlan) -> list[str]:
    lines = [_explain_micro_batch(plan), *(line for lever in plan.levers for line in _explain(plan, lever))]
    kept = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in allowances(plan.card).items())
    disk = [f"Disk: {disk_text(plan.best.estimate)}."] if plan.best.estimate.disk_bytes else []
    together = [
        f"{_named(values)} is not possible: {_first_line(reason)}"
        for values, reason in plan.impossible.items()
        if len(values) > 1
    ]
    estimate = plan.best.estimate
    assumed = [f"Assumed: {assumption}." for assumption in estimate.assumptions]
    if estimate.unreached:
        assumed.append(f"Got no gradient in the simulation: {', '.join(estimate.unreached[:5])}.")
    return [*lines, *together, *disk, f"Kept free, assumed: {kept}.", *assumed]


def _explain_micro_batch(plan: SettingsPlan) -> str:
    best = plan.best
    larger = [row for row in plan.rows if row.settings == best.settings and row.micro_batch > best.micro_batch]
    if not larger and best.accumulation == 1:
        return f"micro-batch {best.micro_batch}: the whole batch fits at once."
    if not larger and best.micro_batch == plan.micro_batches[-1]:
        return f"micro-batch {best.micro_batch}: as given."
    if not larger:
        return f"micro-batch {best.micro_batch}: larger ones exceed the card's memory by far, or save no time."
    following = min(larger, key=lambda row: row.micro_batch)
    if following.fits:
        ratio = following.update_ms / best.update_ms
        return (
            f"micro-batch {best.micro_batch}, not {following.micro_batch}: an update takes {ratio:.2f} times as long."
        )
    needed = format_gib(following.needed_bytes)
    return f"micro-batch {best.micro_batch}: {following.micro_batch} would need {needed} with these settings."


def _explain(plan: SettingsPlan, lever: Lever) -> Iterator[str]:
    chosen = plan.best.settings[lever.name]
    for value in lever.values:
        if value == chosen:
            continue
        reason = plan.impossible.get(frozenset({(lever.name, value)}))
        if reason is not None:
            yield f"{lever.name} {value} is not possible here: {_first_line(reason)}"
            continue
        rows = [row for row in plan.rows if row.settings[lever.name] == value]
        fitting = [row for row in rows if row.fits]
        if fitting:
            ratio = min(row.update_ms for row in fitting) / plan.best.update_ms
            yield f"{lever.name} {chosen}, not {value}: with {value} an update takes {ratio:.2f} times as long."
        elif rows:
            needed = min(row.needed_bytes for row in rows) / GIB
            yield f"{lever.name} {chosen}, not {value}: with {value} nothing fits; {needed:.2f} GiB at least."
        elif any(row.settings[lever.name] == lever.adaptive.get(value) for row in plan.rows):
            yield f"{lever.name} {chosen}, not {value}: with {value} none was forecast to fit in less time."
        else:
            batch = "whole batch" if any(row.fits and row.accumulation == 1 for row in plan.rows) else "micro-batch"
            yield f"{lever.name} {chosen}, not {value}: not needed, since the {batch} fits without it."


def _named(values: frozenset[tuple[str, Any]]) -> str:
    return " with ".join(f"{name} {value}" for name, value in sorted(values))


def _first_line(reason: str) -> str:
    return reason.partition("\n")[0]


def describe(row: Row) -> str:
    settings = [f"{_NAMES.get(name, name)} {_value(row, name)}" for name in row.settings]
    return ", ".join([f"micro-batch {row.micro_batch} x {row.accumulation}", *settings])
