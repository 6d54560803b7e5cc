"""The teacher of one SmolVLA student: found, checked, loaded on first use and kept out of the student's sight."""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy, VLAFlowMatching
from torch import Tensor

from hf_memopt.integrations.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.integrations.lerobot.policy_files import (
    check_same_architecture,
    check_same_statistics,
    check_weights_file,
    load_config,
    load_policy,
    resolve_checkpoint,
)
from hf_memopt.integrations.lerobot.reflow.prefix import ConditionedExpert, Observation, SharedPrefix
from hf_memopt.teacher import OffloadedTeacher, TeacherReport
from hf_memopt.transfer import Copier

logger = logging.getLogger(__name__)


class ReflowTeacher:
    """Loads the teacher named in a student's configuration and samples couplings from it.

    No `nn.Module`, and copies and pickles carry the configuration alone: a deep copy of the student (an exponential
    moving average, say) has no teacher until it trains by itself.

    Args:
        config: the student's.
        copier: how the teacher's weights move; None, what suits the student's device.
    """

    def __init__(self, config: SmolVLAReflowConfig, copier: Copier | None = None) -> None:
        self._config = config
        self._copier = copier
        self._policy: SmolVLAPolicy | None = None
        self._offloaded: OffloadedTeacher | None = None
        # Why the prefix is not shared; None once it is.
        self.sharing_obstacle: str | None = "the teacher is not loaded"

    @property
    def shares_prefix(self) -> bool:
        """Whether the student's VLM serves both models."""
        return self.sharing_obstacle is None

    def check(self, dataset_stats: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Everything that can be refused without loading a weight, so that it is refused before training starts.

        Raises:
            ValueError: missing or damaged checkpoint, other architecture or features, other normaliser statistics.
        """
        folder = resolve_checkpoint(str(self._config.teacher_model_path))
        config = load_config(folder)
        check_weights_file(folder)
        if not config.use_cache:
            raise ValueError(f"the teacher's config in {folder} has use_cache=false; SmolVLA cannot sample without it")
        check_same_architecture(self._config, config)
        if dataset_stats is not None:
            check_same_statistics(folder, config, dataset_stats)

    def load(self, student: SmolVLAPolicy) -> SmolVLAPolicy:
        """The teacher's policy, loaded on the first call. Its model is at home on the host between samples.

        Args:
            student: decides the device and, where its frozen VLM is bitwise the teacher's, holds it for both.

        Raises:
            ValueError: as `check`, or `share_prefix=on` cannot be had.
        """
        if self._policy is None:
            policy = self._load_policy()
            self.sharing_obstacle = sharing_obstacle(student, policy)
            self._report_sharing()
            _cast(policy.model, self._config.teacher_dtype, with_vlm=not self.shares_prefix)
            self._offloaded = OffloadedTeacher(
                policy.model,
                device=next(student.parameters()).device,
                mode=self._config.teacher_offload,  # type: ignore[arg-type]
                share_with=student.model if self.shares_prefix else None,
                budget_gib=self._config.teacher_budget_gib,
                copier=self._copier,
            )
            self._policy = policy
        return self._policy

    @torch.no_grad()
    def sample(self, observation: Observation, noise: Tensor, prefix: SharedPrefix | None) -> Tensor:
        """Where the teacher's ODE takes `noise`: `(batch, chunk, max_action_dim)`, float32.

        Args:
            observation: conditions the teacher.
            noise: `(batch, chunk, max_action_dim)`.
            prefix: the student's, if it is shared; otherwise the teacher computes its own.
        """
        with self.visit() as model:
            assert self._policy is not None
            if prefix is None:
                actions: Tensor = model.sample_actions(*observation.arguments(), noise=noise)
            else:
                actions = ConditionedExpert(model, prefix).sample(noise, self._policy.config.num_steps)
        return actions.to(noise.dtype)

    @contextmanager
    def visit(self) -> Iterator[VLAFlowMatching]:
        """The loaded teacher's model, on the student's device for as long as the context lasts. May be nested."""
        assert self._offloaded is not None
        # The teacher runs in the dtype of its weights; the student's autocast would cast them again at every step.
        with self._offloaded.onload() as model, torch.autocast(self._offloaded.device.type, enabled=False):
            assert isinstance(model, VLAFlowMatching)
            yield model

    @property
    def num_steps(self) -> int:
        """Euler steps of the loaded teacher."""
        assert self._policy is not None
        return int(self._policy.config.num_steps)

    def prefetch(self) -> None:
        """Start bringing the weights for the next sample, if the teacher is loaded."""
        if self._offloaded is not None:
            self._offloaded.prefetch()

    def report(self) -> TeacherReport | None:
        """What the teacher costs, or None before it is loaded."""
        return None if self._offloaded is None else self._offloaded.report()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReflowTeacher":
        # Through `memo`, so that the copied student and its teacher go on sharing one configuration.
        return ReflowTeacher(copy.deepcopy(self._config, memo), self._copier)

    def __reduce__(self) -> Any:
        return ReflowTeacher, (self._config,)

    def _load_policy(self) -> SmolVLAPolicy:
        self.check(None)
        changes: dict[str, Any] = {"vlm_model_name": self._config.vlm_model_name}
        if self._config.teacher_num_steps is not None:
            changes["num_steps"] = self._config.teacher_num_steps
        policy = load_policy(resolve_checkpoint(str(self._config.teacher_model_path)), **changes)
        policy.requires_grad_(False)
        return policy

    def _report_sharing(self) -> None:
        if self.shares_prefix:
            logger.info("shared prefix: on; the VLM is held and run once for student and teacher")
        elif self._config.share_prefix == "on":
            raise ValueError(f"share_prefix=on cannot be had: {self.sharing_obstacle}")
        else:
            logger.info("shared prefix: off; %s", self.sharing_obstacle)


def sharing_obstacle(student: SmolVLAPolicy, teacher: SmolVLAPolicy) -> str | None:
    """Why student and teacher cannot share the VLM's work, and the flag that would change it; None if they can.

    The teacher's VLM takes the student's dtype where that loses nothing.
    """
    obstacle = own_obstacle(student)
    if obstacle is not None:
        return obstacle
    teachers = dict(teacher.model.vlm_with_expert.vlm.named_parameters())
    for name, ours in student.model.vlm_with_expert.vlm.named_parameters():
        theirs = teachers.get(name)
        if theirs is None or not _adopt_dtype(theirs, ours) or not torch.equal(theirs.to(ours.device), ours):
            return f"the student's VLM differs from the teacher's in {name} (prepare-student starts from the teacher)"
    return None


def own_obstacle(student: SmolVLAPolicy) -> str | None:
    """What about the student alone keeps its prefix from being computed once and without a graph; None if nothing."""
    config = student.config
    if config.share_prefix == "off":
        return "share_prefix=off was asked for"
    if not config.train_expert_only:
        return "the student trains its VLM (--policy.train_expert_only=true would freeze it)"
    if config.prefix_length > 0:
        return "prefix_length pads behind the state token (--policy.prefix_length=-1 would not)"
    if config.compile_model:
        return "compile_model compiles the joint forward pass (--policy.compile_model=false would not)"
    for name, weight in student.model.vlm_with_expert.vlm.named_parameters():
        if weight.requires_grad:
            return f"the student trains the VLM's weight {name} (freeze it, or leave it out of the adapter's targets)"
    return None


def _adopt_dtype(teacher: torch.nn.Parameter, student: Tensor) -> bool:
    cast = teacher.data.to(student.dtype)
    lossless = cast.shape == student.shape and torch.equal(cast.to(teacher.dtype), teacher.data)
    if lossless:
        teacher.data = cast
    return lossless


def _cast(model: VLAFlowMatching, dtype: str | None, with_vlm: bool) -> None:
    """Cast transformer weights. The projections around them and all buffers (rotary frequencies) keep theirs."""
    if dtype is None:
        return
    part = model.vlm_with_expert if with_vlm else model.vlm_with_expert.lm_expert
    for parameter in part.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
