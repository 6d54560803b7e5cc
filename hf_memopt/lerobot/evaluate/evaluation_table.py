"""A comparison of student and teacher as a table and as a figure."""

from collections.abc import Mapping
from typing import Any

from hf_memopt.lerobot.evaluate.measure import FIGURES, ReflowEvaluation
from hf_memopt.lerobot.evaluate.rollouts import RolloutResult
from hf_memopt.text_table import align

_SIDES = (("teacher", "#7f8c9b"), ("student", "#e58b3d"))
_COLUMNS = ("error", "spread", "ms")

Rollouts = Mapping[int, RolloutResult]


def table(evaluation: ReflowEvaluation, rollouts: Rollouts | None = None) -> str:
    header = ["steps", *(f"{name} {figure}" for figure in _COLUMNS for name, _ in _SIDES)]
    rows = [[*header, *(["success", "reward"] if rollouts else [])]]
    for steps in evaluation.student.error:
        rows.append([str(steps)])
        for field, form in (FIGURES[title] for title in _COLUMNS):
            rows[-1] += [format(getattr(side, field)[steps], form) for side in (evaluation.teacher, evaluation.student)]
        if rollouts:
            rows[-1] += [f"{rollouts[steps].success_rate:.0%}", f"{rollouts[steps].mean_reward:.3f}"]
    return "\n".join(
        [
            *align(rows, ">"),
            "",
            f"straightness (0 is straight): teacher {evaluation.teacher.normalized_straightness:.4f}, "
            f"student {evaluation.student.normalized_straightness:.4f}",
            f"error: root mean square difference to the teacher's {evaluation.teacher_num_steps} steps from the same "
            "noise. spread: standard deviation over noise; near 0, the model has collapsed. ms: for one chunk.",
        ]
    )


def draw(figure: Any, evaluation: ReflowEvaluation) -> None:
    figure.set_size_inches(9, 3)
    titles = {"error": "error to the teacher", "spread": "spread over noise", "latency_ms": "ms per chunk"}
    for axes, (field, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for name, color in _SIDES:
            values = getattr(getattr(evaluation, name), field)
            axes.plot(list(values), list(values.values()), marker="o", color=color, label=name)
        axes.set_title(title)
        axes.set_xlabel("Euler steps")
        axes.set_ylim(bottom=0)
    axes.legend()
