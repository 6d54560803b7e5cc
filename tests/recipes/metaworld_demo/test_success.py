import json
from pathlib import Path

import pytest

from hf_memopt.recipes.metaworld_demo.success import SuccessRate, read_successes


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
