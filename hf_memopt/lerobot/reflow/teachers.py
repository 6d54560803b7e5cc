"""The teacher of a student: a checkpoint, kept off the device between samples, or the student itself."""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hf_memopt.lerobot.files.policy_files import (
    check_same_architecture,
    check_same_statistics,
    check_weights_file,
    folder_of_weights,
    load_config,
    load_teacher,
    resolve_checkpoint,
)
from hf_memopt.lerobot.flow.flow_policy import Observation, SharedPrefix
from hf_memopt.lerobot.flow.known_flows import flow_of
from hf_memopt.lerobot.flow.reflow_options import ReflowOptions
from hf_memopt.transfer import Copier
from hf_memopt.units import MIB
from hf_memopt.weights import OffloadedTeacher, TeacherReport

logger = logging.getLogger(__name__)

_NUM_STEPS = 2  # of a student that teaches itself, as in SnapFlow, arXiv 2604.05656


class VelocityTeacher:
    """Holds the velocity field that a student learns from: the part that both kinds of teachers share.

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

    def check(self, dataset_stats: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Raise a ValueError for all that can be refused before training starts, without loading a weight."""

    def prefetch(self) -> None:
        """Start bringing the weights for the next sample, if the teacher is loaded."""

    def report(self) -> TeacherReport | None:
        """Return the cost of the teacher, or None before it is loaded, or if it holds no weights."""
        return None

    def shared_prefix(self, student: PreTrainedPolicy, observation: Observation) -> SharedPrefix | None:
        """Return the prefix that serves both models, or None if each needs another one."""
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
    """Return why the student alone cannot have its prefix computed once and without a graph, or None if it can."""
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


class ReflowTeacher(VelocityTeacher):
    """A checkpoint: found, checked, loaded on first use and kept off the device between samples."""

    def __init__(self, config: ReflowOptions, copier: Copier | None = None) -> None:
        super().__init__(config)
        self._copier = copier
        self._policy: PreTrainedPolicy | None = None
        self._offloaded: OffloadedTeacher | None = None

    def check(self, dataset_stats: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Raise ValueError for a damaged checkpoint, other architecture, features or statistics; loads no weight."""
        folder = resolve_checkpoint(str(self._config.teacher_model_path))
        config = load_config(folder)
        check_weights_file(folder)
        check_same_architecture(self._config, config)
        self._flow.check_teacher(folder, config)
        if dataset_stats is not None:
            check_same_statistics(folder, config, dataset_stats)

    def load(self, student: PreTrainedPolicy) -> PreTrainedPolicy:
        """Return the teacher's policy, loaded on the first call; ValueError as `check` or for `share_prefix=on`.

        A frozen VLM that is bitwise the student's is held once.
        """
        if self._policy is None:
            check_replicated(student)
            self.check(None)
            policy = load_teacher(resolve_checkpoint(str(self._config.teacher_model_path)), self._config)
            self._flow.leave_out_unused(policy.model)
            policy.requires_grad_(False)
            self._share(why_not_shared(student, policy))
            shared = self.why_not_shared is None
            if shared and self._config.vlm_home != "device":
                # The module, not its weights alone: its calls bring them.
                policy.model.set_submodule(self._flow.vlm_path, self._flow.vlm(student.model))
            transformer = self._flow.transformer(policy.model, with_vlm=not shared)
            if self._config.teacher_dtype is not None:
                # The projections around the transformer and all buffers (rotary frequencies) keep theirs.
                for weight in transformer:
                    weight.data = weight.data.to(getattr(torch, self._config.teacher_dtype))
            self._say_what_float32_costs(transformer)
            self._offloaded = OffloadedTeacher(
                policy.model,
                device=next(student.parameters()).device,
                mode=self._config.teacher_offload,
                share_with=student.model if shared else None,
                budget_gib=self._config.teacher_budget_gib,
                copier=self._copier,
                **self._home(),
            )
            self._policy = policy
        return self._policy

    @torch.no_grad()
    def sample(self, observation: Observation, noise: Tensor, prefix: SharedPrefix | None) -> Tensor:
        """Return where the teacher's ODE takes `noise`: `(batch, chunk, max_action_dim)`, float32.

        `prefix` is the student's, if it is shared; otherwise stock lerobot's own operations compute all, bitwise.
        """
        with self.visit() as model:
            if prefix is None:
                actions: Tensor = model.sample_actions(*observation.arguments(), noise=noise)
            else:
                actions = self._flow.expert(model, prefix).sample(noise, self.num_steps)
        return actions.to(noise.dtype)

    @contextmanager
    def visit(self) -> Iterator[Any]:
        """Keep the loaded teacher's model on the student's device, without autocast; may be nested."""
        assert self._offloaded is not None
        # The teacher runs in the dtype of its weights; the student's autocast would cast them again at every step.
        with self._offloaded.onload() as model, torch.autocast(self._offloaded.device.type, enabled=False):
            yield model

    @property
    def num_steps(self) -> int:
        assert self._policy is not None
        return int(getattr(self._policy.config, self._flow.steps_field))

    def prefetch(self) -> None:
        if self._offloaded is not None:
            self._offloaded.prefetch()

    def report(self) -> TeacherReport | None:
        return None if self._offloaded is None else self._offloaded.report()

    def _home(self) -> dict[str, Any]:
        if self._config.teacher_home == "host":
            return {}
        folder = folder_of_weights(resolve_checkpoint(str(self._config.teacher_model_path)))
        return {"home": "file", "files": [folder], "disk": self._config.activation_disk}

    def _say_what_float32_costs(self, transformer: list[torch.nn.Parameter]) -> None:
        num_bytes = sum(weight.nbytes for weight in transformer if weight.dtype == torch.float32)
        if num_bytes and (self._config.dtype, self._config.teacher_dtype) == ("bfloat16", None):
            logger.info(
                "teacher: it computes in float32, the dtype of its checkpoint, while the student trains in bfloat16; "
                "--policy.teacher_dtype=bfloat16 makes %.1f MiB of its weights %.1f MiB, on the host, on the link and "
                "on the device, and rounds its targets",
                num_bytes / MIB,
                num_bytes / 2 / MIB,
            )


def why_not_shared(student: PreTrainedPolicy, teacher: PreTrainedPolicy) -> str | None:
    """Return the reason why the two cannot share the VLM's work, with the flag that changes it, or None if they can.

    The teacher's VLM takes the student's dtype where that loses nothing.
    """
    why_not = why_student_cannot_share(student)
    if why_not is not None:
        return why_not
    flow = flow_of(student.config)
    teachers = dict(flow.vlm(teacher.model).named_parameters())
    for name, ours in flow.vlm(student.model).named_parameters():
        theirs = teachers.get(name)
        if theirs is None or not _adopt_dtype(theirs, ours) or not torch.equal(theirs.to(ours.device), ours):
            return f"the student's VLM differs from the teacher's in {name} (prepare-student starts from the teacher)"
    return None


def _adopt_dtype(teacher: torch.nn.Parameter, student: Tensor) -> bool:
    cast = teacher.data.to(student.dtype)
    lossless = cast.shape == student.shape and torch.equal(cast.to(teacher.dtype), teacher.data)
    if lossless:
        teacher.data = cast
    return lossless


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
