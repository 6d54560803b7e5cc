"""A student that trains without a second model: from couplings on disk, or on targets of its own present weights."""

import copy
import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy, VLAFlowMatching
from torch import Tensor

from hf_memopt.integrations.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.integrations.lerobot.reflow.prefix import ConditionedExpert, Observation, SharedPrefix
from hf_memopt.integrations.lerobot.reflow.reflow_teacher import own_obstacle
from hf_memopt.teacher import TeacherReport

logger = logging.getLogger(__name__)


class SelfTeacher:
    """Stands where a `ReflowTeacher` stands, and owns no weights: the student's present ones are the teacher's.

    Targets of a network that is being trained move with it, and nothing but `reflow_real_data` ties them to the data.

    Args:
        config: the student's.
    """

    def __init__(self, config: SmolVLAReflowConfig) -> None:
        self._config = config
        self._student: weakref.ref[SmolVLAPolicy] | None = None
        self.sharing_obstacle: str | None = "the student has not been used"

    @property
    def shares_prefix(self) -> bool:
        """Whether the prefix is computed once and without a graph."""
        return self.sharing_obstacle is None

    @property
    def num_steps(self) -> int:
        """Euler steps for a target."""
        return self._config.teacher_num_steps or int(self._config.num_steps)

    def check(self, dataset_stats: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Nothing can be wrong with the teacher that is not wrong with the student."""

    def load(self, student: SmolVLAPolicy) -> SmolVLAPolicy:
        """The student.

        Raises:
            ValueError: `share_prefix=on` cannot be had.
        """
        if self._student is None or self._student() is not student:
            self._student = weakref.ref(student)
            self.sharing_obstacle = own_obstacle(student)
            if self.sharing_obstacle is not None and self._config.share_prefix == "on":
                raise ValueError(f"share_prefix=on cannot be had: {self.sharing_obstacle}")
            logger.info("shared prefix: %s", "on" if self.shares_prefix else f"off; {self.sharing_obstacle}")
        return student

    @torch.no_grad()
    def sample(self, observation: Observation, noise: Tensor, prefix: SharedPrefix | None) -> Tensor:
        """See `ReflowTeacher.sample`."""
        with self.visit() as model:
            own = SharedPrefix(model, observation) if prefix is None else prefix
            return ConditionedExpert(model, own).sample(noise, self.num_steps).to(noise.dtype)

    @contextmanager
    def visit(self) -> Iterator[VLAFlowMatching]:
        """The student's model, in evaluation mode and without autocast for as long as the context lasts."""
        assert self._student is not None
        student = self._student()
        assert student is not None
        model, training = student.model, student.model.training
        model.eval()
        try:
            with torch.autocast(next(model.parameters()).device.type, enabled=False):
                yield model
        finally:
            model.train(training)

    def prefetch(self) -> None:
        """There is nothing to fetch."""

    def report(self) -> TeacherReport | None:
        """There is no teacher to report on."""
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "SelfTeacher":
        # Through `memo`, so that the copied student and its teacher go on sharing one configuration.
        return SelfTeacher(copy.deepcopy(self._config, memo))

    def __reduce__(self) -> Any:
        return SelfTeacher, (self._config,)
