"""The ways of giving a student its teacher's targets that the teacher benchmark compares."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import PhasePeaks
from slow_link import SlowLinkCopier
from smolvla import observe
from torch import Tensor, nn

from hf_memopt.integrations.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.integrations.lerobot.prefix import Observation
from hf_memopt.integrations.lerobot.teacher import ReflowTeacher
from hf_memopt.teacher import OffloadedTeacher, TeacherReport
from hf_memopt.transfer import SyncCopier

Batch = dict[str, Tensor]
TargetFunction = Callable[[Observation, Tensor], Tensor]  # (observation, noise) -> the teacher's actions
LossFunction = Callable[[Batch, Tensor, Tensor, PhasePeaks], Tensor]  # (batch, noise, time, peaks) -> scalar


@dataclass(frozen=True)
class Source:
    """What every mode is built from.

    Attributes:
        policy: student and teacher at their start, on the CPU.
        checkpoint: the same, on disk.
        device: where training runs.
        dtype: of the teacher's weights; bfloat16 also stands for the student's autocast.
    """

    policy: SmolVLAReflowPolicy
    checkpoint: Path
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class Handling:
    """One mode, ready to train.

    Attributes:
        student: on the device.
        target: the teacher's actions for one batch.
        loss: the student's loss for one batch, with the target it takes from the teacher.
        report: what the teacher has cost so far, where this library handles it.
        moved_bytes: what a step must move over the host link in each direction, where that is known beforehand.
    """

    student: SmolVLAReflowPolicy
    target: TargetFunction
    loss: LossFunction
    report: Callable[[], TeacherReport | None] = lambda: None
    moved_bytes: int | None = None


class Sampler(nn.Module):
    """A stock teacher whose `forward` solves its ODE, since hooks of other libraries see calls of `forward` only."""

    def __init__(self, policy: SmolVLAReflowPolicy) -> None:
        super().__init__()
        self.model = copy.deepcopy(policy.model).requires_grad_(False)
        self.model.train(False)

    def forward(self, *arguments: Any) -> Tensor:
        """Arguments of `sample_actions`, the noise last."""
        *observation, noise = arguments
        actions: Tensor = self.model.sample_actions(*observation, noise=noise)
        return actions

    def cast(self, dtype: torch.dtype) -> "Sampler":
        """Cast the transformers' parameters alone: buffers and projections keep their precision."""
        for parameter in self.model.vlm_with_expert.parameters():
            parameter.data = parameter.data.to(dtype)
        return self


def resident(source: Source) -> Handling:
    """The teacher's weights stay on the device."""
    sampler = Sampler(source.policy).cast(source.dtype).to(source.device)
    return _with_stock_teacher(source, _in_own_dtype(sampler), moved_bytes=0)


def seed(source: Source) -> Handling:
    """The whole module to the device and back for each target, cast both ways, as the first design had it.

    That design casts projections and buffers too, which only runs inside the student's autocast.
    """
    sampler = Sampler(source.policy).to(device="cpu", dtype=torch.float32)

    @torch.no_grad()
    def target(observation: Observation, noise: Tensor) -> Tensor:
        sampler.to(device=source.device, dtype=source.dtype)
        try:
            actions: Tensor = sampler(*observation.arguments(), noise)
        finally:
            sampler.to(device="cpu", dtype=torch.float32)
            if source.device.type != "cpu":
                torch.accelerator.empty_cache()
        return actions

    tensors = (*sampler.parameters(), *sampler.buffers())
    moved_bytes = sum(tensor.numel() * source.dtype.itemsize for tensor in tensors)
    return _with_stock_teacher(source, target, moved_bytes=moved_bytes)


def accelerate_cpu_offload(source: Source) -> Handling:
    """accelerate's `cpu_offload`: each layer's weights come when it runs and are dropped afterwards."""
    from accelerate import cpu_offload

    sampler = Sampler(source.policy).cast(source.dtype)
    cpu_offload(sampler, execution_device=source.device)
    return _with_stock_teacher(source, _in_own_dtype(sampler))


def diffusers_block(source: Source) -> Handling:
    """diffusers' group offloading by blocks. Its groups are the direct children's lists; a VLA has none there."""
    return _diffusers(source, offload_type="block_level", num_blocks_per_group=1)


def diffusers_leaf(source: Source) -> Handling:
    """diffusers' group offloading by leaves, each prefetched on a stream while the one before it runs."""
    return _diffusers(source, offload_type="leaf_level")


def _diffusers(source: Source, **options: Any) -> Handling:
    from diffusers.hooks import apply_group_offloading

    sampler = Sampler(source.policy).cast(source.dtype)
    use_stream = source.device.type != "cpu"
    apply_group_offloading(sampler, onload_device=source.device, use_stream=use_stream, **options)
    return _with_stock_teacher(source, _in_own_dtype(sampler))


def offloaded(source: Source, mode: str, share_prefix: str = "off", link_gb_per_s: float | None = None) -> Handling:
    """This library's policy.

    Args:
        source: what it is built from.
        mode: `"swap"`, the teacher's weights come in one block; `"stream"`, as they are used, and those of the expert
            stay from the first step to the last.
        share_prefix: whether the student's VLM serves both.
        link_gb_per_s: a slower link than the machine's, emulated.
    """
    student = _student(
        source,
        use_reflow=True,
        teacher_model_path=str(source.checkpoint),
        teacher_offload=mode,
        teacher_dtype=str(source.dtype).removeprefix("torch."),
        share_prefix=share_prefix,
    )
    if link_gb_per_s is not None:
        student._teacher = ReflowTeacher(student.config, SlowLinkCopier(source.device, link_gb_per_s))
    student.load_teacher_model()

    def target(observation: Observation, noise: Tensor) -> Tensor:
        return student.generate_reflow_target(*observation.arguments(), noise)

    def loss(batch: Batch, noise: Tensor, time: Tensor, peaks: PhasePeaks) -> Tensor:
        student.memory = peaks
        return student(batch, noise=noise, time=time)[0]

    return Handling(student, target, loss, report=student.teacher_report)


def stream_all(source: Source) -> Handling:
    """Streaming without a hot set: the expert's weights come again for each Euler step."""
    sampler = Sampler(source.policy).cast(source.dtype)
    copier = SyncCopier() if source.device.type == "cpu" else None
    teacher = OffloadedTeacher(sampler, device=source.device, mode="stream", budget_gib=0, copier=copier)

    def target(observation: Observation, noise: Tensor) -> Tensor:
        with teacher.onload():
            return _in_own_dtype(sampler)(observation, noise)

    return replace(_with_stock_teacher(source, target), report=teacher.report)


def _with_stock_teacher(source: Source, target: TargetFunction, moved_bytes: int | None = None) -> Handling:
    """One student path for every mode but this library's: what the library's unshared path does, in its order."""
    student = _student(source, use_reflow=False, share_prefix="off")
    num_action_dims = student.config.action_feature.shape[0]

    def loss(batch: Batch, noise: Tensor, time: Tensor, peaks: PhasePeaks) -> Tensor:
        observation = observe(student, batch)
        actions = target(observation, noise)
        peaks.mark("teacher")
        squared = student.model.forward(*observation.arguments(), actions, noise, time)
        mean = squared[..., :num_action_dims].mean(dim=(1, 2)).mean()
        peaks.mark("forward")
        return mean

    return Handling(student, target, loss, moved_bytes=moved_bytes)


def _student(source: Source, **settings: Any) -> SmolVLAReflowPolicy:
    for name, value in settings.items():
        setattr(source.policy.config, name, value)
    return copy.deepcopy(source.policy).to(source.device).train()


def _in_own_dtype(sampler: Sampler) -> TargetFunction:
    @torch.no_grad()
    def target(observation: Observation, noise: Tensor) -> Tensor:
        with torch.autocast(noise.device.type, enabled=False):
            actions: Tensor = sampler(*observation.arguments(), noise)
        return actions

    return target


# The reference first, then what the targets are about, then other libraries.
MODES: dict[str, Callable[[Source], Handling]] = {
    "resident": resident,
    "seed": seed,
    "swap": partial(offloaded, mode="swap"),
    "swap+shared": partial(offloaded, mode="swap", share_prefix="on"),
    "stream": partial(offloaded, mode="stream"),
    "stream+shared": partial(offloaded, mode="stream", share_prefix="on"),
    "stream-all": stream_all,
    "diffusers-leaf": diffusers_leaf,
    "diffusers-block": diffusers_block,
    "accelerate": accelerate_cpu_offload,
}


def on_links(modes: list[str], links_gb_per_s: list[float]) -> dict[str, Callable[[Source], Handling]]:
    """Swap and stream, as far as they are among `modes`, over slower links."""
    return {
        f"{mode} {gb_per_s:g} GB/s": partial(offloaded, mode=mode, link_gb_per_s=gb_per_s)
        for mode in ("swap", "stream")
        if mode in modes
        for gb_per_s in links_gb_per_s
    }


OTHER_LIBRARIES = ("diffusers-leaf", "diffusers-block", "accelerate")
