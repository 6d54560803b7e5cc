"""A plan as a table."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from hf_memopt.activations.planner.offload_plan import OffloadPlan
from hf_memopt.activations.planner.profile import Action
from hf_memopt.text_table import Table
from hf_memopt.units import MIB


@dataclass(frozen=True)
class SavedBy:
    """Bytes that one kind of module saves, by the plan's action; a star in `owner` stands for a layer's number."""

    owner: str
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int


@dataclass(frozen=True)
class PlanReport:
    """One plan, and its rows by kind of module, the largest first; `str` makes a table of it."""

    plan: OffloadPlan
    rows: tuple[SavedBy, ...]

    def __str__(self) -> str:
        cells = [[row.owner, *(num_bytes / MIB for num_bytes in astuple(row)[1:])] for row in self.rows]
        table = Table(["saved by (MiB)", "kept", "offloaded", "recomputed"], cells, digits=2)
        return f"{table}\n{self.plan.summary()}"


@dataclass(frozen=True)
class OffloadReport:
    """The plans of an `ActivationOffloader` by kind of module; printing it gives tables.

    Attributes:
        plans: the newest one for each model and device that has one.
        note: why there is none; empty where there is one.
        wear: bytes written to a disk so far, and in a day at that rate; empty without a disk.
    """

    plans: tuple[PlanReport, ...]
    note: str = ""
    wear: str = ""

    def __str__(self) -> str:
        plans = "\n\n".join(map(str, self.plans)) or self.note
        return f"{plans}\n{self.wear}" if self.wear else plans


def plan_report(plan: OffloadPlan, owners: Sequence[str], sizes: Sequence[int]) -> PlanReport:
    rows: defaultdict[str, dict[Action, int]] = defaultdict(lambda: dict.fromkeys(Action, 0))
    for owner, num_bytes, action in zip(owners, sizes, plan.actions, strict=False):
        rows[re.sub(r"\.\d+(?=\.|$)", ".*", owner) or "outside the model"][action] += num_bytes
    largest_first = sorted(rows.items(), key=lambda row: -sum(row[1].values()))
    return PlanReport(plan, tuple(SavedBy(owner, *sums.values()) for owner, sums in largest_first))
