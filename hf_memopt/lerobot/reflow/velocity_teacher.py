"""The interface of a student's teacher: a velocity field, and whether one prefix serves both models."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hf_memopt.lerobot.flow.flow_policy import Observation, SharedPrefix
from hf_memopt.lerobot.flow.known_flows import flow_of
from hf_memopt.lerobot.flow.reflow_options import ReflowOptions
from hf_memopt.weights import TeacherReport

logger = logging.getLogger(__name__)


class VelocityTeacher(ABC):
    """Holds the velocity field that a student learns from.

    This is no `nn.Module`, so that the student's parameters(), state_dict(), train() and to() do not see it. Copies and
    pickles carry the configuration alone: a deep copy of the student (an exponential moving average, say) has no
    teacher until it trains by itself. `why_not_shared` is None once the student's prefix serves the teacher too.
    """

    why_not_shared: str | None = "the teacher is not loaded"

    def __init__(self, config: ReflowOptions) -> None:
        self._config: Any = config
        self._flow = flow_of(self._config)

    def __reduce__(self) -> Any:
        return type(self), (self._config,)

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Euler steps of the loaded teacher."""

    @abstractmethod
    def load(self, student: PreTrainedPolicy) -> PreTrainedPolicy:
        """Return the teacher's policy, loaded on the first call; ValueError as `check` or for `share_prefix=on`."""

    @abstractmethod
    def visit(self) -> AbstractContextManager[Any]:
        """Keep the loaded teacher's model on the student's device, without autocast; may be nested."""

    @abstractmethod
    def sample(self, observation: Observation, noise: Tensor, prefix: SharedPrefix | None) -> Tensor:
        """Return where the teacher's ODE takes `noise`: `(batch, chunk, max_action_dim)`, float32.

        `prefix` is the student's, if it is shared; otherwise the teacher computes its own.
        """

    def check(self, dataset_stats: Mapping[str, Mapping[str, Any]] | None) -> None:  # noqa: B027
        """Raise a ValueError for all that can be refused before training starts, without loading a weight."""

    def prefetch(self) -> None:  # noqa: B027
        """Start bringing the weights for the next sample, if the teacher is loaded."""

    def report(self) -> TeacherReport | None:
        """Return the cost of the teacher; None before it is loaded, or if it has no weights of its own."""
        return None

    def shared_prefix(self, student: PreTrainedPolicy, observation: Observation) -> SharedPrefix | None:
        """Compute the prefix that serves both models; None if each needs its own."""
        return self._flow.prefix(student.model, observation) if self.why_not_shared is None else None

    def _share(self, why_not: str | None) -> None:
        if why_not is not None and self._config.share_prefix == "on":
            raise ValueError(f"share_prefix=on cannot be had: {why_not}")
        self.why_not_shared = why_not
        shared = "on; the VLM is held and run once for student and teacher"
        logger.info("shared prefix: %s", shared if why_not is None else f"off; {why_not}")


def check_replicated(student: PreTrainedPolicy) -> None:
    """Raise ValueError for a student that FSDP has sharded: it gathers weights of called modules, not of parts."""
    for name, module in student.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"the student is sharded ({name or 'the whole policy'}); its layers are not called as modules, so "
                "that FSDP would not gather their weights. Train with a copy in each process (parallelism.dp_shard=1)"
            )


def why_student_cannot_share(student: PreTrainedPolicy) -> str | None:
    """Return why the student alone cannot have its prefix computed once and without a graph; None if it can."""
    config = student.config
    if config.share_prefix == "off":
        return "share_prefix=off was asked for"
    if not config.train_expert_only:
        return "the student trains its VLM (--policy.train_expert_only=true would freeze it)"
    flow = flow_of(config)
    setting = flow.why_not_shareable(config)
    if setting is not None:
        return setting
    if config.compile_model:
        return "compile_model compiles the joint forward pass (--policy.compile_model=false would not)"
    for name, weight in flow.vlm(student.model).named_parameters():
        if weight.requires_grad:
            return f"the student trains the VLM's weight {name} (freeze it, or leave it out of the adapter's targets)"
    return None
