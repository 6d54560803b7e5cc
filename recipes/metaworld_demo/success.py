"""Success rates as `lerobot-eval` wrote them, with confidence intervals."""

import json
from math import sqrt
from pathlib import Path
from typing import NamedTuple

Z_95 = 1.959964


class SuccessRate(NamedTuple):
    successes: int
    episodes: int

    @property
    def rate(self) -> float:
        return self.successes / self.episodes

    def interval(self) -> tuple[float, float]:
        """Return Wilson's 95 % confidence interval, which holds for rates near 0 and 1 too."""
        n, z = self.episodes, Z_95
        middle = self.rate + z**2 / (2 * n)
        spread = z * sqrt(self.rate * (1 - self.rate) / n + z**2 / (4 * n**2))
        return max(0.0, (middle - spread) / (1 + z**2 / n)), min(1.0, (middle + spread) / (1 + z**2 / n))

    def in_words(self) -> str:
        low, high = self.interval()
        return f"{self.rate:.0%} ({low:.0%} to {high:.0%})"


def read_successes(folder: Path) -> dict[str, SuccessRate]:
    """Return the success rate of each task in the output folder of a `lerobot-eval`, and of `all` together."""
    found = {}
    for task in json.loads((folder / "eval_info.json").read_text())["per_task"]:
        successes = task["metrics"]["successes"]
        found[task["task_group"]] = SuccessRate(sum(successes), len(successes))
    return with_all(found)


def with_all(rates: dict[str, SuccessRate]) -> dict[str, SuccessRate]:
    return {**rates, "all": SuccessRate(*(sum(column) for column in zip(*rates.values(), strict=True)))}
