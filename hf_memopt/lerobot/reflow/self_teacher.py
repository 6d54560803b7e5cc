"""A student without a second model: on couplings from disk, or on targets of its own present weights."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from hf_memopt.lerobot.flow.flow_policy import Observation, SharedPrefix
from hf_memopt.lerobot.flow.reflow_options import ReflowOptions
from hf_memopt.lerobot.reflow.velocity_teacher import VelocityTeacher, check_replicated, why_student_cannot_share

_NUM_STEPS = 2  # as in SnapFlow, arXiv 2604.05656


class SelfTeacher(VelocityTeacher):
    """Teaches with the student's present weights. The targets move; only `reflow_real_data` ties them to the data."""

    def __init__(self, config: ReflowOptions) -> None:
        super().__init__(config)
        # Weak, since the student owns its teacher.
        self._student: Callable[[], PreTrainedPolicy | None] = lambda: None

    @property
    def num_steps(self) -> int:
        return self._config.teacher_num_steps or _NUM_STEPS

    def load(self, student: PreTrainedPolicy) -> PreTrainedPolicy:
        if self._student() is not student:
            check_replicated(student)
            self._share(why_student_cannot_share(student))
            self._student = weakref.ref(student)
        return student

    @torch.no_grad()
    def sample(self, observation: Observation, noise: Tensor, prefix: SharedPrefix | None) -> Tensor:
        with self.visit() as model:
            own = self._flow.prefix(model, observation) if prefix is None else prefix
            return self._flow.expert(model, own).sample(noise, self.num_steps).to(noise.dtype)

    @contextmanager
    def visit(self) -> Iterator[Any]:
        student = self._student()
        assert student is not None
        model, training = student.model, student.model.training
        model.eval()
        try:
            with torch.autocast(next(model.parameters()).device.type, enabled=False):
                yield model
        finally:
            model.train(training)
