"""A plan as a table that a person can read."""

import re
from collections import defaultdict
from collections.abc import Sequence

from hf_memopt.activations.planner.offload_plan import Plan
from hf_memopt.activations.planner.simulator import Action

_MIB = 2**20
_COLUMNS = {Action.KEEP: "kept", Action.OFFLOAD: "offloaded", Action.RECOMPUTE: "recomputed"}


def plan_report(plan: Plan, owners: Sequence[str], sizes: Sequence[int]) -> str:
    """MiB by owner and action, owners that differ only in a layer's number together; the largest first."""
    rows = _by_owner(plan, owners, sizes)
    width = max(len("saved by"), *(len(owner) for owner in rows))
    lines = [f"{'saved by':{width}}  " + "".join(f"{title:>12}" for title in _COLUMNS.values()) + "   (MiB)"]
    for owner, by_action in sorted(rows.items(), key=lambda row: -sum(row[1].values())):
        lines.append(f"{owner:{width}}  " + "".join(f"{by_action[action] / _MIB:12.2f}" for action in _COLUMNS))
    return "\n".join([*lines, plan.summary()])


def _by_owner(plan: Plan, owners: Sequence[str], sizes: Sequence[int]) -> dict[str, dict[Action, int]]:
    rows: defaultdict[str, dict[Action, int]] = defaultdict(lambda: dict.fromkeys(Action, 0))
    for owner, num_bytes, action in zip(owners, sizes, plan.actions, strict=False):
        rows[re.sub(r"\.\d+(?=\.|$)", ".*", owner) or "outside the model"][action] += num_bytes
    return dict(rows)
