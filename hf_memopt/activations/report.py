"""A plan as a table that a person can read."""

import re
from collections import defaultdict

from hf_memopt.activations.planner import Plan
from hf_memopt.activations.recording import Recording
from hf_memopt.activations.timeline import Action

_MIB = 2**20
_COLUMNS = {Action.KEEP: "kept", Action.OFFLOAD: "offloaded", Action.RECOMPUTE: "recomputed"}


def plan_report(plan: Plan, recording: Recording) -> str:
    """MiB by owner and action, owners that differ only in a layer's number together; the largest first."""
    rows = _by_owner(plan, recording)
    width = max(len("saved by"), *(len(owner) for owner in rows))
    lines = [f"{'saved by':{width}}  " + "".join(f"{title:>12}" for title in _COLUMNS.values()) + "   (MiB)"]
    for owner, sizes in sorted(rows.items(), key=lambda row: -sum(row[1].values())):
        lines.append(f"{owner:{width}}  " + "".join(f"{sizes[action] / _MIB:12.2f}" for action in _COLUMNS))
    return "\n".join([*lines, plan.summary()])


def _by_owner(plan: Plan, recording: Recording) -> dict[str, dict[Action, int]]:
    rows: defaultdict[str, dict[Action, int]] = defaultdict(lambda: dict.fromkeys(Action, 0))
    for owner, num_bytes, action in zip(recording.owners, recording.sizes, plan.actions, strict=False):
        rows[re.sub(r"\.\d+(?=\.|$)", ".*", owner) or "outside the model"][action] += num_bytes
    return dict(rows)
