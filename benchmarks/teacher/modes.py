"""The modes of handling a teacher's weights that the teacher benchmark compares."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.teacher.smolvla import observe
from benchmarks.timing import PhasePeaks
from hf_memopt.lerobot.flow.flow_policy import Observation
from hf_memopt.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.transfer import SyncCopier
from hf_memopt.weights import OffloadedTeacher, TeacherReport

Batch = dict[str, Tensor]
TargetFunction = Callable[[Observation, Tensor], Tensor]  # (observation, noise) -> the teacher's actions
LossFunction = Callable[[Batch, Tensor, Tensor, PhasePeaks], Tensor]  # (batch, noise, time, peaks) -> scalar


@dataclass(frozen=True)
class Source:
    policy: SmolVLAReflowPolicy  # student and teacher at the start, on the CPU: copied for the teacher, and trained
    checkpoint: Path  # the same policy
    device: torch.device
    dtype: torch.dtype  # of the teacher's weights; bfloat16 also means autocast for the student


@dataclass(frozen=True)
class Handling:
    """One mode, ready to train."""

    student: SmolVLAReflowPolicy
    target: TargetFunction  # the teacher's actions
    loss: LossFunction  # the student's, the teacher's target included
    report: Callable[[], TeacherReport | None] = lambda: None
    moved_bytes: int | None = None  # over the host link in each direction, per step, if known beforehand


class Sampler(nn.Module):
    """A stock teacher whose `forward` solves its ODE, since hooks of other libraries run only in `forward`."""

    def __init__(self, policy: SmolVLAReflowPolicy) -> None:
        super().__init__()
        self.model = copy.deepcopy(policy.model).requires_grad_(False)
        self.model.train(False)

    def forward(self, *arguments: Any) -> Tensor:
        *observation, noise = arguments
        actions: Tensor = self.model.sample_actions(*observation, noise=noise)
        return actions

    def cast(self, dtype: torch.dtype) -> "Sampler":
        """Cast the transformers' parameters alone: buffers and projections keep their precision."""
        for parameter in self.model.vlm_with_expert.parameters():
            parameter.data = parameter.data.to(dtype)
        return self


def resident(source: Source) -> Handling:
    sampler = Sampler(source.policy).cast(source.dtype).to(source.device)
    return _with_stock_teacher(source, _in_own_dtype(sampler), moved_bytes=0)


def seed(source: Source) -> Handling:
    """Move the whole module to the device and back for each target, with casts, as the first design did.

    That design casts projections and buffers too, which works only inside the student's autocast.
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
    """Use accelerate's `cpu_offload`, on CUDA with page-locked weights; by itself it copies from pageable memory."""
    import accelerate

    sampler = Sampler(source.policy).cast(source.dtype)
    weights = sampler.state_dict()
    if source.device.type == "cuda":
        weights = {name: tensor.pin_memory() for name, tensor in weights.items()}
    accelerate.cpu_offload(sampler, execution_device=source.device, state_dict=weights)
    return _with_stock_teacher(source, _in_own_dtype(sampler))


def diffusers_group_offload(source: Source, *, by_block: bool) -> Handling:
    """Use diffusers' group offloading, by leaf modules or by blocks, which are as coarse as lerobot's model allows."""
    from diffusers import hooks

    sampler = Sampler(source.policy).cast(source.dtype)
    groups: dict[str, Any] = {"offload_type": "leaf_level"}
    if by_block:
        sampler.blocks = _into_blocks(sampler.model.vlm_with_expert)
        groups = {"offload_type": "block_level", "num_blocks_per_group": 1}
    use_stream = source.device.type != "cpu"
    # Without `record_stream` the host waits for the device after each group.
    hooks.apply_group_offloading(
        sampler, onload_device=source.device, use_stream=use_stream, record_stream=use_stream, **groups
    )
    return _with_stock_teacher(source, _in_own_dtype(sampler))


def _into_blocks(model: Any) -> nn.ModuleList:
    """Move all called modules into one list, since diffusers finds blocks in lists right below the root.

    lerobot calls vision layers, but only the parts of VLM and expert layers, so that these parts have to be the blocks.
    The lists' owners as `block_modules` do not help: they are not called either, and with streams diffusers refuses
    more than one level of them.
    """
    vlm = model.get_vlm_model()
    parts = [(vlm.vision_model.encoder, "layers"), (vlm, "connector"), (model.vlm, "lm_head")]
    parts += [(vlm.text_model, "embed_tokens"), (vlm.text_model, "norm"), (model.lm_expert, "norm")]
    for layer in (*vlm.text_model.layers, *model.lm_expert.layers):
        parts += [(layer.self_attn, f"{name}_proj") for name in "qkvo"]
        parts += [(layer, name) for name in ("input_layernorm", "post_attention_layernorm", "mlp")]
    blocks = nn.ModuleList()
    for owner, name in parts:
        part = owner._modules.pop(name)
        owner.__dict__[name] = part  # still its attribute, but no module of it
        blocks.extend(part if isinstance(part, nn.ModuleList) else [part])
    return blocks


def offloaded(source: Source, mode: str, share_prefix: str = "off") -> Handling:
    """Use this library's policy; with `share_prefix="on"` student and teacher use the student's VLM."""
    student = _student(
        source,
        use_reflow=True,
        teacher_model_path=str(source.checkpoint),
        teacher_offload=mode,
        teacher_dtype=str(source.dtype).removeprefix("torch."),
        share_prefix=share_prefix,
    )
    student.load_teacher_model()

    def target(observation: Observation, noise: Tensor) -> Tensor:
        return student.generate_reflow_target(*observation.arguments(), noise)

    def loss(batch: Batch, noise: Tensor, time: Tensor, peaks: PhasePeaks) -> Tensor:
        student.memory = peaks
        return student(batch, noise=noise, time=time)[0]

    return Handling(student, target, loss, report=student.teacher.report)


def stream_all(source: Source) -> Handling:
    """Stream without a hot set: the expert's weights are copied again for each Euler step."""
    sampler = Sampler(source.policy).cast(source.dtype)
    copier = SyncCopier() if source.device.type == "cpu" else None
    teacher = OffloadedTeacher(sampler, device=source.device, mode="stream", budget_gib=0, copier=copier)

    def target(observation: Observation, noise: Tensor) -> Tensor:
        with teacher.onload():
            return _in_own_dtype(sampler)(observation, noise)

    return replace(_with_stock_teacher(source, target), report=teacher.report)


def _with_stock_teacher(source: Source, target: TargetFunction, moved_bytes: int | None = None) -> Handling:
    """Give a mode of another library the student's part of this library's unshared path."""
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
    return source.policy.to(source.device).train()


def _in_own_dtype(sampler: Sampler) -> TargetFunction:
    @torch.no_grad()
    def target(observation: Observation, noise: Tensor) -> Tensor:
        with torch.autocast(noise.device.type, enabled=False):
            actions: Tensor = sampler(*observation.arguments(), noise)
        return actions

    return target


# The reference first, then the modes of the targets, then other libraries.
MODES: dict[str, Callable[[Source], Handling]] = {
    "resident": resident,
    "seed": seed,
    "swap": partial(offloaded, mode="swap"),
    "swap+shared": partial(offloaded, mode="swap", share_prefix="on"),
    "stream": partial(offloaded, mode="stream"),
    "stream+shared": partial(offloaded, mode="stream", share_prefix="on"),
    "diffusers-leaf": partial(diffusers_group_offload, by_block=False),
    "diffusers-block": partial(diffusers_group_offload, by_block=True),
    "accelerate": accelerate_cpu_offload,
    "stream-all": stream_all,
}
OTHER_LIBRARIES = {"diffusers-leaf": "diffusers", "diffusers-block": "diffusers", "accelerate": "accelerate"}
