"""The quality of a reflowed student with few Euler steps, next to its teacher and on the same noise, and its table."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from httpx import HTTPError
from lerobot.configs import FeatureType, PreTrainedConfig
from lerobot.datasets import LeRobotDataset, LeRobotDatasetMetadata
from lerobot.datasets.factory import resolve_delta_timestamps
from lerobot.datasets.utils import CompatibilityError
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION
from torch import Tensor
from tqdm import tqdm

from hf_memopt.lerobot.files.checkpoint_files import load_processors
from hf_memopt.lerobot.files.policy_files import load_config, resolve_checkpoint
from hf_memopt.lerobot.flow.flow_policy import Observation
from hf_memopt.lerobot.flow.known_flows import flow_of, observe
from hf_memopt.memory.device_counters import device_name
from hf_memopt.planning.accounting.allocation_log import AllocationLog, StepPhases
from hf_memopt.reflow import straightness
from hf_memopt.report.runs import Outcome, steps_text
from hf_memopt.text_table import align

if TYPE_CHECKING:
    from hf_memopt.lerobot.evaluate.rollouts import RolloutResult

Batch = Mapping[str, Tensor]
Rollouts = Mapping[int, "RolloutResult"]
Sample = tuple[Batch, Tensor, Tensor]  # a batch, its noise, and the actions that the teacher's own sampling makes of it

_NUM_SPREAD_SAMPLES = 8
_NUM_LATENCY_RUNS = 7
_SIDES = (("teacher", "#7f8c9b"), ("student", "#e58b3d"))
_COLUMNS = ("error", "spread", "ms")
# By title of a column, field of `ModelEvaluation` and form of its numbers.
FIGURES = {
    "error": ("error", ".4f"),
    "spread": ("spread", ".4f"),
    "ms": ("latency_ms", ".1f"),
    "success": ("success_rate", ".0%"),
}


@dataclass(frozen=True)
class ModelEvaluation:
    """One model's side of a comparison. Actions are normalised; dictionaries are keyed by number of Euler steps."""

    error: dict[int, float]  # root mean square difference to the teacher's own sampling from the same noise
    action_error: dict[int, float]  # the same to the demonstrated actions, where they are not padding
    straightness: float  # see `hf_memopt.reflow.straightness`, on the teacher's number of steps
    normalized_straightness: float  # divided by the mean squared length of the path
    spread: dict[int, float]  # standard deviation over noise, for one observation; near 0, the model has collapsed
    latency_ms: dict[int, float]  # median time to sample one chunk for one observation on the device
    weights_bytes: int  # and of buffers
    sampling_bytes: int  # peak of all other tensors, while one chunk is sampled
    success_rate: dict[int, float] = field(default_factory=dict)  # share of successful tries; empty without any


@dataclass(frozen=True)
class ReflowEvaluation:
    """Student and teacher on the same observations; the reference takes `teacher_num_steps` steps."""

    num_observations: int
    teacher_num_steps: int
    device: str
    teacher: ModelEvaluation
    student: ModelEvaluation

    def with_success(self, **rates: dict[int, float]) -> "ReflowEvaluation":
        """Return the same with the success rates of `teacher`, `student` or both, by number of Euler steps."""
        sides = {name: dataclasses.replace(getattr(self, name), success_rate=rate) for name, rate in rates.items()}
        return dataclasses.replace(self, **sides)

    def outcomes(self, student_steps: int) -> dict[str, Outcome]:
        """Return the teacher's result with its own steps, and the student's with `student_steps`."""
        sides = {"teacher": (self.teacher, self.teacher_num_steps), "student": (self.student, student_steps)}
        return {
            name: Outcome(steps, side.success_rate.get(steps), side.latency_ms[steps])
            for name, (side, steps) in sides.items()
        }

    def shortcoming(self, student_steps: int) -> str | None:
        """Return a warning where the student is further from the teacher than the teacher itself with as few steps."""
        student, teacher = (side.error.get(student_steps) for side in (self.student, self.teacher))
        if student is None or teacher is None or student <= teacher:
            return None
        return (
            f"With {steps_text(student_steps)} the student's error, {student:.4f}, is above the teacher's own with as "
            f"few, {teacher:.4f}: it has not learned from its teacher yet; train it for longer."
        )


def evaluate_reflow(
    student: PreTrainedPolicy,
    teacher: PreTrainedPolicy,
    batches: Sequence[Batch],
    *,
    num_steps: Sequence[int] = (1, 2, 4, 10),
) -> ReflowEvaluation:
    """Compare a student with its teacher, whose own number of Euler steps defines the reference actions.

    `batches` are preprocessed, on the policies' device, with actions. The noise is the same for every model and number
    of steps. Costs `len(num_steps) + 2` samplings per model and batch, and for spread and latency another 15 of one
    batch for each number of steps. Training mode, configurations and the global random generator are left as they were.
    """
    reference_steps: int = getattr(teacher.config, flow_of(teacher.config).steps_field)
    samples = []
    for seed, batch in enumerate(batches):
        shape = (len(batch[ACTION]), teacher.config.chunk_size, teacher.config.max_action_dim)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(batch[ACTION].device)
        samples.append((batch, noise, sample_trajectory(teacher, observe(teacher, batch), noise, reference_steps)[-1]))
    policies = {"teacher": teacher, "student": student}
    sides = {
        name: _evaluate_model(policy, samples, reference_steps, num_steps, name) for name, policy in policies.items()
    }
    noise = samples[0][1]
    times_ms = _latencies_ms(policies, batches[0], noise[:1], sorted({1, *num_steps, reference_steps}))
    sides = {name: dataclasses.replace(side, latency_ms=times_ms[name]) for name, side in sides.items()}
    num_observations = sum(len(batch[ACTION]) for batch in batches)
    return ReflowEvaluation(num_observations, reference_steps, device_name(noise.device), **sides)


def held_out_batches(
    policy: str | Path,
    repo_id: str,
    root: Path | None = None,
    episodes: Sequence[int] | None = None,
    batch_size: int = 16,
    max_observations: int = 256,
    device: str = "cpu",
) -> list[dict[str, Tensor]]:
    """Load observations, spread evenly over a LeRobotDataset's episodes, preprocessed as for checkpoint `policy`.

    ValueError where that cannot be read, lacks one of the episodes, or has actions or states of another size.
    """
    folder = resolve_checkpoint(policy)
    config = load_config(folder)
    overrides = {"device_processor": {"device": device}}
    preprocess, _ = load_processors(config, folder, overrides)
    with reading_dataset(repo_id, root):
        metadata = LeRobotDatasetMetadata(repo_id, root=root)
        count = metadata.total_episodes
        if missing := sorted(episode for episode in episodes or () if episode >= count):
            raise ValueError(f"episodes={missing}: dataset {repo_id!r} has {count}, numbered 0 to {count - 1}")
        _check_sizes(repo_id, metadata.features, config)
        timestamps = resolve_delta_timestamps(config, metadata)
        chosen = None if episodes is None else list(episodes)
        dataset = LeRobotDataset(repo_id, root=root, episodes=chosen, delta_timestamps=timestamps)
    indices = torch.linspace(0, len(dataset) - 1, min(len(dataset), max_observations)).round().long().tolist()
    loader = torch.utils.data.DataLoader(torch.utils.data.Subset(dataset, indices), batch_size=batch_size)
    return [preprocess(batch) for batch in loader]


def _check_sizes(repo_id: str, features: Mapping[str, Any], config: PreTrainedConfig) -> None:
    for name, feature in {**config.input_features, **config.output_features}.items():
        found = tuple(features[name]["shape"]) if name in features else tuple(feature.shape)
        if feature.type is not FeatureType.VISUAL and found != tuple(feature.shape):
            raise ValueError(
                f"dataset {repo_id!r} has {name!r} of shape {found}, the policy's is {tuple(feature.shape)}; measure "
                "on data of the same robot"
            )


@contextmanager
def reading_dataset(repo_id: str, root: Path | str | None) -> Iterator[None]:
    try:
        yield
    except (OSError, HTTPError) as error:
        place = "lerobot's cache or on the hub" if root is None else f"folder {str(root)!r}"
        raise ValueError(
            f"dataset {repo_id!r} cannot be read from {place} ({error}); name one with --dataset-repo-id and "
            "--dataset-root (in training with --dataset.repo_id and --dataset.root)"
        ) from error
    except (CompatibilityError, NotImplementedError) as error:  # the latter for formats before 2.1
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        commands = [f"; convert it: {line}" for line in lines if line.startswith("python -m")]
        raise ValueError(
            f"dataset {repo_id!r} is in a format of another lerobot: {''.join([lines[0], *commands[:1]])}"
        ) from error


def _evaluate_model(
    policy: PreTrainedPolicy, samples: Sequence[Sample], reference_steps: int, num_steps: Sequence[int], name: str
) -> ModelEvaluation:
    dims = policy.config.action_feature.shape[0]
    errors: dict[int, list[Tensor]] = {steps: [] for steps in num_steps}
    action_errors: dict[int, list[Tensor]] = {steps: [] for steps in num_steps}
    paths = []
    for batch, noise, reference in tqdm(samples, desc=f"evaluate {name}", unit="batch"):
        observation = observe(policy, batch)
        paths.append(sample_trajectory(policy, observation, noise, reference_steps)[..., :dims])
        for steps in num_steps:
            actions = sample_trajectory(policy, observation, noise, steps)[-1]
            errors[steps].append((actions - reference)[..., :dims].flatten())
            error, padding = actions[..., :dims] - batch[ACTION], batch.get("action_is_pad")
            action_errors[steps].append((error if padding is None else error[~padding]).flatten())
    path = torch.cat(paths, dim=1)
    batch, noise, _ = samples[0]
    first = observe(policy, batch)
    all_steps = sorted({1, *num_steps, reference_steps})
    weights_bytes, sampling_bytes = memory_to_act(policy, _observe_one(policy, batch), noise[:1])
    return ModelEvaluation(
        error={steps: _rms(found) for steps, found in errors.items()},
        action_error={steps: _rms(found) for steps, found in action_errors.items()},
        straightness=straightness(path).item(),
        normalized_straightness=straightness(path, normalize=True).item(),
        spread={steps: _spread(policy, first, noise, steps, dims) for steps in all_steps},
        latency_ms={},
        weights_bytes=weights_bytes,
        sampling_bytes=sampling_bytes,
    )


def sample_trajectory(policy: PreTrainedPolicy, observation: Observation, noise: Tensor, num_steps: int) -> Tensor:
    """Return the states that lerobot's own sampling passes, `(num_steps + 1, batch, chunk, width)`, noise first."""
    states = [noise]
    # Stands in for lerobot's real-time-chunking processor, which sampling shows every state to.
    recorder = SimpleNamespace(is_debug_enabled=lambda: True, track=lambda x_t, **_: states.append(x_t))
    with _sampling(policy, num_steps, recorder):
        policy.model.sample_actions(*observation.arguments(), noise=noise)
    return torch.stack(states)


@contextmanager
def _sampling(policy: PreTrainedPolicy, num_steps: int, recorder: SimpleNamespace | None = None) -> Iterator[None]:
    training = policy.training
    with_steps = patch.object(policy.config, flow_of(policy.config).steps_field, num_steps)
    policy.eval()
    try:
        with with_steps, patch.object(policy.model, "rtc_processor", recorder), torch.no_grad():
            yield
    finally:
        policy.train(training)


def _spread(policy: PreTrainedPolicy, observation: Observation, noise: Tensor, num_steps: int, dims: int) -> float:
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(noise.shape, generator=generator).to(noise.device) for _ in range(_NUM_SPREAD_SAMPLES)]
    samples = torch.stack([sample_trajectory(policy, observation, draw, num_steps)[-1] for draw in draws])
    return samples[..., :dims].std(dim=0).mean().item()


def _observe_one(policy: PreTrainedPolicy, batch: Batch) -> Observation:
    return observe(policy, {key: value[:1] for key, value in batch.items() if isinstance(value, Tensor)})


def _latencies_ms(
    policies: Mapping[str, PreTrainedPolicy], batch: Batch, noise: Tensor, all_steps: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Return median times by policy and number of steps. Policies take turns: other load falls on all alike."""
    observations = {name: _observe_one(policy, batch) for name, policy in policies.items()}
    times: dict[str, dict[int, list[float]]] = {name: {steps: [] for steps in all_steps} for name in policies}
    for steps in all_steps:
        for _ in range(_NUM_LATENCY_RUNS):
            for name, policy in policies.items():
                times[name][steps].append(_latency_ms(policy, observations[name], noise, steps))
    return {name: {steps: statistics.median(found[steps]) for steps in all_steps} for name, found in times.items()}


def _latency_ms(policy: PreTrainedPolicy, observation: Observation, noise: Tensor, num_steps: int) -> float:
    wait: Callable[[], None] = torch.accelerator.synchronize if noise.device.type != "cpu" else lambda: None
    with _sampling(policy, num_steps):
        wait()
        start = time.perf_counter()
        policy.model.sample_actions(*observation.arguments(), noise=noise)
        wait()
        return 1e3 * (time.perf_counter() - start)


def memory_to_act(policy: PreTrainedPolicy, observation: Observation, noise: Tensor) -> tuple[int, int]:
    """Return the bytes of weights and buffers, and the peak of other tensors in one Euler step; more hold no more."""
    storages = (tensor.untyped_storage() for tensor in (*policy.parameters(), *policy.buffers()))
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    log = AllocationLog(noise.device.type, 1, StepPhases())
    with _sampling(policy, 1), log:
        policy.model.sample_actions(*observation.arguments(), noise=noise)
    history = log.closed()
    on_device = (change.num_bytes for change in history.changes if not history.records[change.storage].on_host)
    return sum(weights.values()), max(accumulate(on_device))


def _rms(errors: Sequence[Tensor]) -> float:
    return torch.cat(list(errors)).square().mean().sqrt().item()


def table(evaluation: ReflowEvaluation, rollouts: Rollouts | None = None) -> str:
    header = ["steps", *(f"{name} {figure}" for figure in _COLUMNS for name, _ in _SIDES)]
    rows = [[*header, *(["success", "reward"] if rollouts else [])]]
    for steps in evaluation.student.error:
        rows.append([str(steps)])
        for name, form in (FIGURES[title] for title in _COLUMNS):
            rows[-1] += [format(getattr(side, name)[steps], form) for side in (evaluation.teacher, evaluation.student)]
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
    for axes, (measured, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for name, color in _SIDES:
            values = getattr(getattr(evaluation, name), measured)
            axes.plot(list(values), list(values.values()), marker="o", color=color, label=name)
        axes.set_title(title)
        axes.set_xlabel("Euler steps")
        axes.set_ylim(bottom=0)
    axes.legend()
