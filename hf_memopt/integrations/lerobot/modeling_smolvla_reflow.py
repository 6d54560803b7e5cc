"""Policy type `smolvla_reflow`: a SmolVLA student that learns straight paths from a teacher's couplings.

The student is an ordinary SmolVLA: same weights, same checkpoint keys, same inference. Only the training loss differs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.utils.constants import OBS_STATE
from torch import Tensor

from hf_memopt.integrations.lerobot.checkpoint_files import no_remote_code
from hf_memopt.integrations.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.integrations.lerobot.policy_files import resolve_checkpoint
from hf_memopt.integrations.lerobot.processors import check_processors
from hf_memopt.integrations.lerobot.reflow.pair_source import CachedPairs, coupling_inputs, frame_noise, without_padding
from hf_memopt.integrations.lerobot.reflow.prefix import (
    ConditionedExpert,
    Observation,
    SharedPrefix,
    demonstrated_actions,
    observe,
)
from hf_memopt.integrations.lerobot.reflow.reflow_teacher import ReflowTeacher
from hf_memopt.integrations.lerobot.reflow.self_teacher import SelfTeacher
from hf_memopt.integrations.lerobot.step_memory import PhaseMemory
from hf_memopt.reflow import chunk_loss, interpolate, reflow_loss, sample_time
from hf_memopt.teacher import TeacherReport
from hf_memopt.units import GIB


class SmolVLAReflowPolicy(SmolVLAPolicy):
    """SmolVLA whose `forward` is the reflow loss while `use_reflow` is set, and the stock loss otherwise.

    Args:
        config: the student's, with the teacher's path.
        dataset_stats: given by lerobot when it trains; then the teacher is checked at once.

    Raises:
        ValueError: see `ReflowTeacher.check`, and `check_processors` for what the student starts from.
    """

    config_class = SmolVLAReflowConfig
    name = "smolvla_reflow"

    def __init__(self, config: SmolVLAReflowConfig, dataset_stats: Any = None, **kwargs: Any) -> None:
        # No nn.Modules, so that parameters(), state_dict(), train() and to() do not see a teacher.
        without = config.teaches_itself or config.couplings_path is not None
        teacher: SelfTeacher | ReflowTeacher = SelfTeacher(config) if without else ReflowTeacher(config)
        cached = CachedPairs(config) if config.use_reflow and config.couplings_path is not None else None
        if config.use_reflow and dataset_stats is not None:
            teacher.check(dataset_stats)
            if cached is not None:
                root = getattr(kwargs.get("dataset_meta"), "root", None)
                cached.check(dataset_stats, None if root is None else Path(root))
        if dataset_stats is not None and config.pretrained_path:
            # lerobot makes the processors next, of these very files.
            config.pretrained_path = resolve_checkpoint(config.pretrained_path, config.pretrained_revision)
            check_processors(config.pretrained_path)
        with no_remote_code():
            super().__init__(config, **kwargs)
        self._teacher, self._cached = teacher, cached
        self.memory: PhaseMemory | None = None

    def forward(
        self, batch: dict[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None, reduction: str = "mean"
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of one batch.

        Args:
            batch: observations, preprocessed; the dataset's actions are used for `reflow_real_data` only. Not modified.
            noise: `(batch, chunk, max_action_dim)`; None draws it, over the full padded width as sampling does.
            time: `(batch,)`; None draws it as `reflow_time_sampling` says.
            reduction: `"mean"`, or `"none"` for one loss per sample, `(batch,)`.

        Returns:
            The loss, and figures to log: `loss`, memory by phase (see `PhaseMemory`) and the teacher's traffic.

        Raises:
            ValueError: `couplings_path` is set, and does not have the pairs of these frames (see
                `CachedPairs.look_up`), or `noise` is given as well.
        """
        if not self.config.use_reflow:
            return super().forward(batch, noise=noise, time=time, reduction=reduction)  # type: ignore[no-any-return]
        pairs = self._known_pairs(batch, noise)
        observation = observe(self, pairs.batch)
        if time is None:
            time = sample_time(len(pairs.noise), self.config.reflow_time_sampling, pairs.noise.device)
        losses = self._reflow_losses(observation, pairs, time)
        loss = losses.mean()
        return (losses if reduction == "none" else loss), {"loss": loss.item(), **self._figures()}

    def load_teacher_model(self) -> SmolVLAPolicy:
        """The teacher: frozen, in evaluation mode, at home on the host unless `teacher_offload=resident`.

        Without a teacher of its own (`teacher_model_path=self`, or `couplings_path`), the student itself.
        """
        return self._teacher.load(self)

    def generate_reflow_target(
        self,
        images: list[Tensor],
        img_masks: list[Tensor],
        lang_tokens: Tensor,
        lang_masks: Tensor,
        state: Tensor,
        noise: Tensor,
    ) -> Tensor:
        """The actions that the teacher's ODE reaches from `noise`, `(batch, chunk, max_action_dim)`.

        Arguments as lerobot's `VLAFlowMatching.sample_actions` takes them. The teacher has left the device again when
        this returns.

        Raises:
            ValueError: with `couplings_path` there is no teacher.
        """
        if self._cached is not None:
            raise ValueError(
                f"couplings_path={self.config.couplings_path!r} has the targets; there is no teacher to ask"
            )
        observation = Observation(images, img_masks, lang_tokens, lang_masks, state)
        self.load_teacher_model()
        self._teacher.prefetch()
        return self._teacher.sample(observation, noise, self._shared_prefix(observation))

    def teacher_report(self) -> TeacherReport | None:
        """What the teacher costs, or None before it was used and where there is none."""
        return self._teacher.report()

    @property
    def sharing_obstacle(self) -> str | None:
        """Why the teacher computes its own prefix; None if the student's serves both."""
        return self._teacher.sharing_obstacle

    def update(self) -> None:
        """Called by lerobot after each optimizer step: the activations are gone, so the teacher may come back now."""
        if self.config.use_reflow:
            self._mark("optimizer")
            self._teacher.prefetch()

    def _shared_prefix(self, observation: Observation) -> SharedPrefix | None:
        return SharedPrefix(self.model, observation) if self._teacher.shares_prefix else None

    def _known_pairs(self, batch: dict[str, Tensor], noise: Tensor | None) -> "_Pairs":
        """What is known of the batch's pairs before the teacher is asked."""
        if self._cached is not None:
            if noise is not None:
                raise ValueError("noise was given, and couplings_path holds the noise of each frame; pass one of them")
            return _Pairs(*self._cached.look_up(batch))
        if noise is not None:
            return _Pairs(batch, noise)
        device = batch[OBS_STATE].device
        if self.config.couplings_seed is not None:
            noise = frame_noise(self.config, batch, device)
            return _Pairs(batch, noise, self._solve_one_by_one(batch, noise))
        shape = (len(batch[OBS_STATE]), self.config.chunk_size, self.config.max_action_dim)
        return _Pairs(batch, self.model.sample_noise(shape, device))

    def solve(self, inputs: dict[str, Tensor], noise: Tensor) -> Tensor:
        """The actions that the teacher's ODE reaches from `noise`, for `couplings_seed` and for `precompute`.

        Autocast does not apply, and padding is cut off first, so that the result for one frame is a function of that
        frame alone; for several frames it is that up to rounding.

        Args:
            inputs: see `coupling_inputs`.
            noise: `(batch, chunk, max_action_dim)`.
        """
        self.load_teacher_model()
        with torch.autocast(noise.device.type, enabled=False):
            observation = observe(self, without_padding(inputs))
            return self._teacher.sample(observation, noise, self._shared_prefix(observation))

    def _solve_one_by_one(self, batch: dict[str, Tensor], noise: Tensor) -> Tensor:
        self.load_teacher_model()
        inputs = coupling_inputs(self.config, batch)
        rows = [{name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in range(len(noise))]
        with self._teacher.visit():
            return torch.cat([self.solve(row, noise[i : i + 1]) for i, row in enumerate(rows)])

    def _reflow_losses(self, observation: Observation, pairs: "_Pairs", time: Tensor) -> Tensor:
        """Per-sample losses. The target comes first, so that the teacher never meets the student's activations."""
        self.load_teacher_model()
        if pairs.target is None:
            self._teacher.prefetch()
        prefix = self._shared_prefix(observation)
        self._mark("prefix")
        noise, target, valid = self._complete(pairs, observation, prefix)
        self._mark("teacher")
        num_action_dims, kind = self.config.action_feature.shape[0], self.config.reflow_loss
        if prefix is None:
            squared = self.model.forward(*observation.arguments(), target, noise, time)
            losses = chunk_loss(squared[..., :num_action_dims], kind, valid)
        else:
            velocity = ConditionedExpert(self.model, prefix).velocity(interpolate(noise, target, time), time)
            losses = reflow_loss(velocity, noise, target, num_action_dims, kind, valid)
        self._mark("forward")
        return losses

    def _complete(
        self, pairs: "_Pairs", observation: Observation, prefix: SharedPrefix | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Noise, actions and which steps of the chunks count (None: all)."""
        if self.config.reflow_real_data > 0:
            return self._mix_in_demonstrations(pairs, observation, prefix)
        if pairs.target is not None:
            return pairs.noise, pairs.target, None
        return pairs.noise, self._teacher.sample(observation, pairs.noise, prefix), None

    @torch.no_grad()
    def _mix_in_demonstrations(
        self, pairs: "_Pairs", observation: Observation, prefix: SharedPrefix | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, noise = pairs.batch, pairs.noise
        from_actions = (torch.rand(len(noise)) < self.config.reflow_real_data).to(noise.device)
        actions = demonstrated_actions(self, batch)
        with self._teacher.visit() as model:
            expert = ConditionedExpert(model, SharedPrefix(model, observation) if prefix is None else prefix)
            num_action_dims = self.config.action_feature.shape[0]
            noise, target = expert.couple(noise, actions, from_actions, self._teacher.num_steps, num_action_dims)
        padding = batch.get("action_is_pad", torch.zeros(actions.shape[:2], dtype=torch.bool, device=noise.device))
        return noise, target, ~(padding & from_actions[:, None])

    def _mark(self, phase: str) -> None:
        if self.memory is None:
            self.memory = PhaseMemory(next(self.parameters()).device)
        self.memory.mark(phase)

    def _figures(self) -> dict[str, float]:
        report = self.teacher_report()
        assert self.memory is not None
        if report is None:
            return self.memory.figures()
        return {**self.memory.figures(), "teacher_own_gib": (report.host_bytes or report.device_bytes) / GIB}


@dataclass(frozen=True)
class _Pairs:
    batch: dict[str, Tensor]
    noise: Tensor
    target: Tensor | None = None
