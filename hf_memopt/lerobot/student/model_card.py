"""The model card of an exported student: how it was made, and the figures of `hf-memopt evaluate`, kept in a file."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from lerobot.configs.train import TRAIN_CONFIG_NAME, TrainPipelineConfig
from lerobot.datasets.factory import make_train_eval_datasets
from lerobot.policies import get_policy_class

from hf_memopt import __version__
from hf_memopt.lerobot.evaluate.measure import (
    FIGURES,
    ModelEvaluation,
    ReflowEvaluation,
    Rollouts,
    draw,
    evaluate_reflow,
    held_out_batches,
)
from hf_memopt.lerobot.files.checkpoint_files import check_processors, file_in, read_object
from hf_memopt.lerobot.files.policy_files import (
    load_config,
    load_policy,
    load_teacher,
    resolve_checkpoint,
    weights_digest,
)
from hf_memopt.lerobot.flow.known_flows import flow_of
from hf_memopt.lerobot.flow.reflow_options import is_student
from hf_memopt.memory.logger import METRICS_FILE, read_metrics
from hf_memopt.report.html_page import render
from hf_memopt.report.runs import gain_line, outcome_line
from hf_memopt.units import format_bytes

EVALUATION_FILE = "evaluation.json"
# JSON has no numbers as keys.
_BY_STEPS = ("error", "action_error", "spread", "latency_ms", "success_rate")
_CARD_SETTINGS = (
    "reflow_target",
    "teacher_num_steps",
    "teacher_dtype",
    "reflow_time_sampling",
    "reflow_loss",
    "reflow_real_data",
    "reflow_round",
    "couplings_seed",
    "couplings_per_frame",
    "share_prefix",
    "dtype",
)
_COLUMNS = ("error", "ms", "success")


@dataclass(frozen=True)
class Observations:
    """Episodes of a LeRobotDataset that a policy is measured on; `held_out` from training as far as is known."""

    repo_id: str
    root: Path | None  # None: lerobot's cache, or the hub
    episodes: Sequence[int] | None  # None: all
    held_out: bool

    def describe(self) -> str:
        number = None if self.episodes is None else len(self.episodes)
        which = "all episodes" if number is None else f"{number} episode{'' if number == 1 else 's'}"
        return f"{which} of `{_plain(self.repo_id)}`{', held out from training' if self.held_out else ''}"


Measured = tuple[ReflowEvaluation, Observations]


def training_observations(folder: Path, episodes: Sequence[int] | None = None) -> Observations:
    """Return episodes of a run's dataset: those given, else those that `--dataset.eval_split` held out, else all."""
    file = file_in(folder, TRAIN_CONFIG_NAME, "so the dataset is unknown; pass --dataset-repo-id")
    read_object(file)
    try:
        cfg = TrainPipelineConfig.from_pretrained(folder)
        _, held_out = make_train_eval_datasets(cfg)
    except Exception as error:
        raise ValueError(
            f"the dataset that {file} names cannot be read: {error.__cause__ or error}; pass --dataset-repo-id"
        ) from error
    root = None if cfg.dataset.root is None else Path(cfg.dataset.root)
    if episodes is None:
        episodes = cfg.dataset.episodes if held_out is None else held_out.episodes
    unseen = held_out is not None and set(episodes) <= set(held_out.episodes)
    return Observations(cfg.dataset.repo_id, root, episodes, held_out=unseen)


def measure(
    policy: str,
    observations: Observations | None = None,
    *,
    teacher: str | None = None,
    num_steps: Sequence[int] = (1, 2, 4, 10),
    device: str = "cpu",
) -> Measured:
    """Evaluate a student against its teacher on at most 256 observations, by default of `training_observations`."""
    folder = resolve_checkpoint(policy)
    config = load_config(folder)
    teacher = teacher or (config.teacher_model_path if is_student(config) else None)
    if not teacher:
        raise ValueError(
            f"{folder} names no teacher to compare with; pass --teacher to `evaluate`, or --no-evaluation to `export`"
        )
    teacher_folder = resolve_checkpoint(teacher)
    for each in (folder, teacher_folder):
        check_processors(each)
    observations = observations or training_observations(folder)
    batches = held_out_batches(folder, observations.repo_id, observations.root, observations.episodes, device=device)
    models = [load_policy(folder), load_teacher(teacher_folder, config)]
    student, teaching = (model.to(device) for model in models)
    return evaluate_reflow(student, teaching, batches, num_steps=num_steps), observations


def write_card(policy: str, num_steps: int, measured: Measured | None) -> str:
    folder = resolve_checkpoint(policy)
    config = load_config(folder)
    # A folder's path says nothing to others and too much about its owner.
    named = getattr(config, "teacher_model_path", None) or ""
    teacher = named if re.fullmatch(r"[\w.-]+/[\w.-]+", named) else None
    sections = [_front_matter(config, teacher), _introduction(config, num_steps, teacher)]
    sections.append(_training(folder, config))
    sections.append("## Measured\n\nNot measured." if measured is None else _measurements(*measured, num_steps))
    return "\n\n".join([*sections, _usage(config, num_steps), ""])


def _front_matter(config: Any, teacher: str | None) -> str:
    data = ModelCardData(
        library_name="lerobot",
        pipeline_tag="robotics",
        license=config.license,
        base_model=teacher,
        tags=sorted({"lerobot", flow_of(config).stock_type, "reflow", "rectified-flow", *(config.tags or ())}),
    )
    return f"---\n{data.to_yaml()}\n---"


def _introduction(config: Any, num_steps: int, teacher: str | None) -> str:
    steps = "one Euler step" if num_steps == 1 else f"{num_steps} Euler steps"
    title = flow_of(config).title
    sampled = "its own sampling" if getattr(config, "teaches_itself", False) else "the teacher's own sampling"
    origin = f"a local {title} checkpoint" if teacher is None else f"`{teacher}`"
    return (
        f"# {title}, reflowed\n\nA {title} policy that samples an action chunk in {steps}. It was distilled by reflow "
        f"(arXiv 2209.03003) from {origin} with hf_memopt {__version__}: trained on the straight lines between noise "
        f"and the actions that {sampled} makes of it."
    )


def _training(folder: Path, config: Any) -> str:
    settings = {name: getattr(config, name) for name in _CARD_SETTINGS if hasattr(config, name)}
    if (folder / TRAIN_CONFIG_NAME).is_file():
        run = read_object(file_in(folder, TRAIN_CONFIG_NAME))
        settings |= {name: run.get(name) for name in ("steps", "batch_size", "seed")}
        for name, (part, field) in {"dataset": ("dataset", "repo_id"), "learning rate": ("optimizer", "lr")}.items():
            if isinstance(run.get(part), dict):
                settings[name] = run[part].get(field)
    settings["peak memory"] = _training_peak(folder)
    rows = [f"| {name} | {_plain(value)} |" for name, value in settings.items() if value is not None]
    return "\n".join(["## How it was made", "", "| setting | value |", "|---|---|", *rows])


def _training_peak(checkpoint: Path) -> str | None:
    file = checkpoint.parents[2] / METRICS_FILE
    logged = read_metrics(file) if checkpoint.parents[1].name == "checkpoints" and file.is_file() else []
    for name, where in {"peak_allocated_gib": "of the device", "host_rss_gib": "of the process"}.items():
        if found := [figures[f"memory/{name}"] for figures in logged if f"memory/{name}" in figures]:
            return f"{max(found):.2f} GiB {where}"
    return None


def _measurements(evaluation: ReflowEvaluation, observations: Observations, num_steps: int) -> str:
    student = evaluation.student
    success = " Success is the share of tries that the task calls one." if student.success_rate else ""
    return "\n".join(
        [
            "## Measured",
            "",
            *(_headline(evaluation, num_steps) if num_steps in student.latency_ms else []),
            f"On {evaluation.num_observations} observations from {observations.describe()}: root mean square error of "
            f"the normalised actions against the teacher's {evaluation.teacher_num_steps}-step actions from the same "
            f"noise, and the median time to sample one action chunk ({_plain(evaluation.device)}, "
            f"preprocessing not included).{success}",
            "",
            *_by_steps(evaluation),
            "",
            f"Memory to act: weights {format_bytes(student.weights_bytes)}, and at most "
            f"{format_bytes(student.sampling_bytes)} of other tensors while a chunk is sampled.",
            "",
            f"Straightness (0 is straight), normalised by the squared length of the path: teacher "
            f"{evaluation.teacher.normalized_straightness:.4f}, student {student.normalized_straightness:.4f}.",
        ]
    )


def _headline(evaluation: ReflowEvaluation, num_steps: int) -> list[str]:
    outcomes = evaluation.outcomes(num_steps)
    lines = [f"**{outcome_line(outcomes)}**, for one action chunk.", gain_line(outcomes), ""]
    warning = evaluation.shortcoming(num_steps)
    return [line for line in lines if line is not None] + ([f"**{warning}**", ""] if warning else [])


def _by_steps(evaluation: ReflowEvaluation) -> Iterator[str]:
    sides = {"teacher": evaluation.teacher, "student": evaluation.student}
    columns = {
        f"{figure}, {name}": (values, form)
        for figure, (field, form) in ((title, FIGURES[title]) for title in _COLUMNS)
        for name, side in sides.items()
        if (values := getattr(side, field))
    }
    yield _row(["Euler steps", *columns])
    yield _row(["---"] * (1 + len(columns)))
    for steps in evaluation.student.error:
        yield _row([str(steps), *(format(values[steps], form) for values, form in columns.values())])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: Any) -> str:
    """Return text of others, with ? for characters that could end a line, a code span or a cell, or be HTML."""
    return re.sub(r"[^\w ./:@+,()-]", "?", str(text))


def _usage(config: Any, num_steps: int) -> str:
    policy_class = get_policy_class(flow_of(config).stock_type)
    return (
        "## Use\n\nAny lerobot 0.6 loads it: `lerobot-rollout --policy.path=<this folder or repository> …`, or\n\n"
        f"```python\nfrom {policy_class.__module__} import {policy_class.__name__}\n\n"
        f'policy = {policy_class.__name__}.from_pretrained("<this folder or repository>", strict=True)\n```\n\n'
        "Real-time chunking needs as much guidance as there are Euler steps: `--inference.type=rtc "
        f"--inference.rtc.max_guidance_weight={num_steps}`."
    )


def write_evaluation(folder: Path, policy: str, measured: Measured, rollouts: Rollouts | None = None) -> list[Path]:
    """Write `evaluation.json` and `evaluation.png`, over older ones. ValueError without matplotlib."""
    evaluation, observations = measured
    folder.mkdir(parents=True, exist_ok=True)
    numbers, figure = folder / EVALUATION_FILE, folder / "evaluation.png"
    found: dict[str, Any] = {
        "weights_sha256": weights_digest(resolve_checkpoint(policy)),
        "observations": dataclasses.asdict(observations),
        **dataclasses.asdict(evaluation),
    }
    if rollouts:
        found["environment"] = {steps: dataclasses.asdict(result) for steps, result in rollouts.items()}
    numbers.write_text(json.dumps(found, indent=2, default=str))
    figure.write_bytes(render(lambda empty: draw(empty, evaluation), dark=False))
    return [numbers, figure]


def read_evaluation(folder: Path, policy: str) -> Measured:
    """Read what `write_evaluation` wrote; ValueError if it cannot be read, or was measured with other weights."""
    file = folder / EVALUATION_FILE
    if not file.is_file():
        raise ValueError(f"evaluation={str(folder)!r} holds no {EVALUATION_FILE}; name the --output of `evaluate`")
    found = read_object(file)
    if found.get("weights_sha256") != weights_digest(resolve_checkpoint(policy)):
        raise ValueError(
            f"evaluation={str(folder)!r} was measured with other weights than {policy} has; run `evaluate` again"
        )
    try:
        root = found["observations"]["root"]
        observations = Observations(**{**found["observations"], "root": None if root is None else Path(root)})
        sides = {name: _model(found[name]) for name in ("teacher", "student")}
        evaluation = ReflowEvaluation(found["num_observations"], found["teacher_num_steps"], found["device"], **sides)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not what `hf-memopt evaluate` writes ({error!r}); run it again") from error
    return evaluation, observations


def _model(found: dict[str, Any]) -> ModelEvaluation:
    by_steps = {name: {int(steps): value for steps, value in found[name].items()} for name in _BY_STEPS}
    return ModelEvaluation(**{**found, **by_steps})
