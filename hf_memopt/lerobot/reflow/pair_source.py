"""The source of a batch's pairs of noise and actions, the teacher at work or the disk, and the key of stored pairs."""

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor

from hf_memopt.disk.files_on_disk import files_sha256
from hf_memopt.lerobot.couplings.cache import CouplingCache, draw_noise, noise_seed
from hf_memopt.lerobot.files.policy_files import load_config, normalizing_statistics, resolve_checkpoint, weights_digest
from hf_memopt.lerobot.flow.flow_policy import Observation, SharedPrefix
from hf_memopt.lerobot.flow.known_flows import flow_of, observe
from hf_memopt.lerobot.flow.reflow_options import ReflowOptions

logger = logging.getLogger(__name__)

Statistics = Mapping[str, Mapping[str, Any]]
Prefix = SharedPrefix | None  # the student's, if its teacher shares it


def coupling_inputs(config: PreTrainedConfig, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors of a preprocessed batch that condition the policy, batch first; padding tokens are zero."""
    names = [key for feature in config.input_features for key in (feature, f"{feature}_padding_mask") if key in batch]
    mask = batch[OBS_LANGUAGE_ATTENTION_MASK].bool()
    return {
        **{name: batch[name] for name in names},
        OBS_LANGUAGE_TOKENS: batch[OBS_LANGUAGE_TOKENS] * mask,
        OBS_LANGUAGE_ATTENTION_MASK: mask,
    }


def without_padding(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    length = int(inputs[OBS_LANGUAGE_ATTENTION_MASK].sum(dim=1).max())
    text = (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)
    return {name: tensor[:, :length] if name in text else tensor for name, tensor in inputs.items()}


def comparable_fields(
    config: PreTrainedConfig, dataset_stats: Statistics, dataset_root: Path | None, teacher: Path | None
) -> dict[str, Any]:
    """Return the fields of a `CouplingSpec.key` that a run has: all, given teacher, dataset and seed."""
    fields: dict[str, Any] = {
        "solver": "euler",
        "preprocessing": preprocessing_sha256(config, dataset_stats),
        "num_steps": config.teacher_num_steps,
        "dtype": config.teacher_dtype,
        "seed": config.couplings_seed,
        "num_draws": config.couplings_per_frame,
        "dataset": None if dataset_root is None else dataset_sha256(dataset_root),
    }
    if teacher is not None:
        fields["weights"] = weights_digest(teacher)
        fields["num_steps"] = config.teacher_num_steps or getattr(load_config(teacher), flow_of(config).steps_field)
        fields["dtype"] = config.teacher_dtype or "as saved"
    return {name: value for name, value in fields.items() if value is not None}


def preprocessing_sha256(config: PreTrainedConfig, dataset_stats: Statistics) -> str:
    fields = {name: getattr(config, name) for name in (*flow_of(config).architecture_fields, "tokenizer_max_length")}
    features = {name: list(feature.shape) for name, feature in config.input_features.items()}
    mapping = {kind: mode.value for kind, mode in config.normalization_mapping.items()}
    statistics = {
        f"{feature}.{statistic}": torch.as_tensor(dataset_stats[feature][statistic]).float().flatten().tolist()
        for feature, statistic in normalizing_statistics(config)
        if statistic in dataset_stats.get(feature, {})
    }
    text = json.dumps([fields, features, mapping, statistics], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def dataset_sha256(root: Path) -> str:
    """Return the SHA-256 of a LeRobotDataset's tables and metadata, and of the names and sizes of its videos."""
    tables = [file for part in ("meta", "data") for file in (root / part).rglob("*") if file.is_file()]
    videos = sorted(file for file in (root / "videos").rglob("*") if file.is_file())
    sizes = [f"{file.relative_to(root).as_posix()} {file.stat().st_size}" for file in videos]
    return hashlib.sha256("\n".join([files_sha256(tables, root), *sizes]).encode()).hexdigest()


class Pairs(NamedTuple):
    """The pairs of noise and actions that a batch is trained on."""

    batch: dict[str, Tensor]  # seen by the student
    noise: Tensor  # (batch, chunk, max_action_dim)
    target: Tensor | None = None  # actions at the other end, in the same shape; None before they are known
    valid: Tensor | None = None  # (batch, chunk) bool, the steps that count; None, all
    at_start: Tensor | None = None  # (batch,) bool, pairs that train only the velocity at the noise; None, none


class PairSource:
    """Gives a batch new noise in each step, and asks the teacher where it leads.

    `draw` comes first: a stored pair brings its own observation, and a run's seed fixes the noise before the times.
    `complete` comes when the prefix is there, which the teacher may share, and before the student's forward, so that
    the teacher never meets the student's activations; pairs that were drawn with their actions need none.
    """

    def check(self, dataset_stats: Statistics, dataset_root: Path | None) -> None:
        """Raise a ValueError for all that can be refused before training starts."""

    def draw(self, student: PreTrainedPolicy, batch: dict[str, Tensor], noise: Tensor | None) -> Pairs:
        return Pairs(batch, self._noise(student, batch) if noise is None else noise)

    def complete(self, pairs: Pairs, student: PreTrainedPolicy, observation: Observation, prefix: Prefix) -> Pairs:
        """Return drawn pairs with their actions."""
        return pairs._replace(target=student.teacher.sample(observation, pairs.noise, prefix))

    def _noise(self, student: PreTrainedPolicy, batch: dict[str, Tensor]) -> Tensor:
        state, config = batch[OBS_STATE], student.config
        shape = (len(state), config.chunk_size, config.max_action_dim)
        return student.model.sample_noise(shape, state.device)


class DemonstratedPairs(PairSource):
    """Makes a share of the paths, `reflow_real_data`, end at the demonstrated actions of the batch."""

    @torch.no_grad()
    def complete(self, pairs: Pairs, student: PreTrainedPolicy, observation: Observation, prefix: Prefix) -> Pairs:
        from_data, actions, valid = _demonstrations(student, pairs.batch)
        flow, num_action_dims = flow_of(student.config), student.config.action_feature.shape[0]
        with student.teacher.visit() as model:
            prefix = flow.prefix(model, observation) if prefix is None else prefix
            noise, target = flow.expert(model, prefix).couple(
                pairs.noise, actions, from_data, student.teacher.num_steps, num_action_dims
            )
        return pairs._replace(noise=noise, target=target, valid=valid)


class OwnPairs(PairSource):
    """Pairs of a student that teaches itself.

    A share, `reflow_real_data`, is flow matching: drawn noise and the batch's demonstrated actions, at all times. They
    keep the velocity field where the data put it. The others are the student's own samples, at time 1 alone: they teach
    the first step the way that several steps go. On both alone the field would follow its own targets anywhere, since
    any field of straight lines is its own target (docs/LOG.md).
    """

    @torch.no_grad()
    def complete(self, pairs: Pairs, student: PreTrainedPolicy, observation: Observation, prefix: Prefix) -> Pairs:
        from_data, actions, valid = _demonstrations(student, pairs.batch)
        own = student.teacher.sample(observation, pairs.noise, prefix)
        target = torch.where(from_data[:, None, None], actions, own)
        return pairs._replace(target=target, valid=valid, at_start=~from_data)


class SeededPairs(PairSource):
    """Gives each frame pairs of its own, the same whenever it is used: `couplings_per_frame` of `couplings_seed`."""

    def complete(self, pairs: Pairs, student: PreTrainedPolicy, observation: Observation, prefix: Prefix) -> Pairs:
        """Solve frame by frame: the neighbours in a batch would change the rounding."""
        inputs, noise = coupling_inputs(student.config, pairs.batch), pairs.noise
        rows = [{name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in range(len(noise))]
        with student.teacher.visit():
            targets = [solve(student, row, noise[i : i + 1]) for i, row in enumerate(rows)]
        return pairs._replace(target=torch.cat(targets))

    def _noise(self, student: PreTrainedPolicy, batch: dict[str, Tensor]) -> Tensor:
        config = student.config
        frames_and_draws = _frames_and_draws(batch, config.couplings_per_frame or 1)
        seeds = [noise_seed(config.couplings_seed, *each) for each in zip(*frames_and_draws, strict=True)]
        return draw_noise(seeds, (config.chunk_size, config.max_action_dim)).to(batch[OBS_STATE].device)


class CachedPairs(PairSource):
    """Reads pairs from the folder that a configuration names. Copies and pickles open it anew."""

    def __init__(self, config: ReflowOptions) -> None:
        self._config = config

    def __reduce__(self) -> Any:
        return CachedPairs, (self._config,)

    def check(self, dataset_stats: Statistics, dataset_root: Path | None) -> None:
        path = self._config.teacher_model_path
        teacher = resolve_checkpoint(path) if path and Path(path).expanduser().exists() else None
        self._cache.check(comparable_fields(self._config, dataset_stats, dataset_root, teacher))
        if teacher is None:
            logger.info("couplings: the teacher is not at hand, so its weights were not compared with the folder's")

    def draw(self, student: PreTrainedPolicy, batch: dict[str, Tensor], noise: Tensor | None) -> Pairs:
        if noise is not None:
            raise ValueError("noise was given, and couplings_path holds the noise of each frame; pass one of them")
        cache = self._cache
        indices, draws = _frames_and_draws(batch, cache.description["num_draws"])
        inputs = None if cache.has_observations else coupling_inputs(self._config, batch)
        coupling = cache.of(indices, draws, inputs)
        device = batch["index"].device
        if cache.has_observations:
            batch = {**batch, **{name: tensor.to(device) for name, tensor in coupling.observation.items()}}
        return Pairs(batch, coupling.noise.to(device), coupling.target.to(device))

    @cached_property
    def _cache(self) -> CouplingCache:
        return CouplingCache(str(self._config.couplings_path))


def make_pair_source(config: ReflowOptions) -> PairSource:
    if config.teaches_itself:
        return OwnPairs()
    if config.couplings_path is not None:
        return CachedPairs(config)
    if config.couplings_seed is not None:
        return SeededPairs()
    return DemonstratedPairs() if config.data_share > 0 else PairSource()


def _demonstrations(student: PreTrainedPolicy, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the paths that end at demonstrations, `(batch,)` bool; return these, the demonstrations, and `Pairs.valid`.

    Behind the end of an episode a demonstration is padding, which is no path.
    """
    actions = flow_of(student.config).demonstrated_actions(student, batch)
    from_data = (torch.rand(len(actions)) < student.config.data_share).to(actions.device)
    padding = batch.get("action_is_pad", actions.new_zeros(actions.shape[:2], dtype=torch.bool))
    return from_data, actions, ~(padding & from_data[:, None])


def solve(student: PreTrainedPolicy, inputs: Mapping[str, Tensor], noise: Tensor) -> Tensor:
    """Return the actions that the teacher's ODE reaches from `noise`, `(batch, chunk, max_action_dim)`.

    Without autocast and padding, so that the result for one frame is a function of that frame alone; for several frames
    it is that up to rounding. `inputs` are from `coupling_inputs`.
    """
    teacher = student.teacher
    teacher.load(student)
    with torch.autocast(noise.device.type, enabled=False):
        observation = observe(student, without_padding(inputs))
        return teacher.sample(observation, noise, teacher.shared_prefix(student, observation))


def _frames_and_draws(batch: Mapping[str, Tensor], num_draws: int) -> tuple[list[int], list[int]]:
    """Return the names of a batch's frames, and which of its `num_draws` pairs each of them gets, at random."""
    if "index" not in batch:
        raise ValueError("the batch has no 'index', which names its frames; couplings need a LeRobotDataset")
    indices = batch["index"].flatten().tolist()
    return indices, torch.randint(num_draws, (len(indices),)).tolist()
