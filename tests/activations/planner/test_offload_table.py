"""Tests of a plan's table: one row for owners that differ only in a layer's number, the largest first."""

from hf_memopt.activations.planner.offload_plan import OffloadPlan, plan_report
from hf_memopt.activations.planner.profile import Action

KEEP, OFFLOAD, RECOMPUTE = Action


def test_rows_are_sums_by_owner_and_action() -> None:
    actions = KEEP, OFFLOAD, RECOMPUTE, OFFLOAD
    plan = OffloadPlan(actions, (0, 0, 0, 0), 0, 0, (1, 3), 2**30, 1.1, 1.0, 0.06, 0.04, 0, 0, 0, 0)
    owners = ["layers.0.mlp", "layers.1.mlp", "head", ""]
    header, *rows, summary = str(plan_report(plan, owners, [2**20, 3 * 2**20, 2**19, 2**18])).splitlines()
    assert header.split() == ["saved", "by", "(MiB)", "kept", "offloaded", "recomputed"]
    assert [row.rsplit(maxsplit=3) for row in rows] == [
        ["layers.*.mlp", "1.00", "3.00", "0.00"],
        ["head", "0.00", "0.00", "0.50"],
        ["outside the model", "0.00", "0.25", "0.00"],
    ]
    assert summary == plan.summary()
