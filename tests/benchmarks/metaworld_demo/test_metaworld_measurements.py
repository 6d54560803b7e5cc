import json
from pathlib import Path

import pytest

from benchmarks.metaworld.measurements import POLICIES, SuccessRate, read_successes, table


def test_policies_are_named_by_checkpoint_and_steps() -> None:
    names = ["teacher_10", "teacher_4", "teacher_2", "teacher_1", "student_1", "second_1"]
    assert [policy.name for policy in POLICIES] == names
    assert [policy.title_with_steps for policy in POLICIES[::4]] == ["teacher, 10 steps", "student, 1 step"]


def test_the_mean_action_stands_below_the_policies() -> None:
    half = {name: {"successes": 1, "episodes": 2} for name in ("reach-v3", "all")}
    policy = {"title": "teacher, 1 step", "success": half, "latency_ms": 1.25, "error": 0.5}
    head, *rows = table({"policies": {"teacher_1": policy}, "mean_action": half}).splitlines()
    assert head.split() == ["reach-v3", "all", "ms", "per", "chunk", "error"]
    assert "50% (9% to 91%)" in rows[0]
    assert rows[0].split()[-2:] == ["1.2", "0.500"]
    assert rows[1].startswith("mean action, repeated")


# The intervals come from statsmodels' proportion_confint(successes, episodes, method="wilson").
@pytest.mark.parametrize(
    ("successes", "episodes", "interval"),
    [(0, 10, (0.0, 0.27753)), (8, 10, (0.49016, 0.94332)), (95, 100, (0.88825, 0.97846)), (50, 50, (0.92865, 1.0))],
)
def test_wilsons_interval(successes: int, episodes: int, interval: tuple[float, float]) -> None:
    assert SuccessRate(successes, episodes).interval() == pytest.approx(interval, abs=1e-4)


def test_a_rate_in_words() -> None:
    assert SuccessRate(95, 100).in_words() == "95% (89% to 98%)"


def test_tasks_are_read_and_added_up(tmp_path: Path) -> None:
    found = {"reach-v3": [True, True, False], "drawer-close-v3": [True]}
    tasks = [{"task_group": name, "task_id": 0, "metrics": {"successes": each}} for name, each in found.items()]
    (tmp_path / "eval_info.json").write_text(json.dumps({"per_task": tasks}))
    assert read_successes(tmp_path) == {"reach-v3": (2, 3), "drawer-close-v3": (1, 1), "all": (3, 4)}
