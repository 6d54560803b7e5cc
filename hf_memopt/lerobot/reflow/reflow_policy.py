"""The training loss of a student, reflow or the policy's own without `use_reflow`, and the memory of its phases."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor, nn

from hf_memopt.activations import ActivationOffloader
from hf_memopt.lerobot.files.checkpoint_files import check_processors, no_remote_code
from hf_memopt.lerobot.files.policy_files import resolve_checkpoint
from hf_memopt.lerobot.flow.flow_policy import Observation, SharedPrefix
from hf_memopt.lerobot.flow.known_flows import flow_of, observe
from hf_memopt.lerobot.reflow.pair_source import Pairs, make_pair_source
from hf_memopt.lerobot.reflow.teachers import ReflowTeacher, SelfTeacher
from hf_memopt.memory.device_counters import Host, counters_for
from hf_memopt.reflow import chunk_loss, interpolate, reflow_loss, sample_time
from hf_memopt.units import GIB
from hf_memopt.weights import StreamedWeights
from hf_memopt.weights.homes.weight_files import folder_with_weights


class PhaseMemory:
    """Reads the memory counters where a phase of a step ends, for figures that go into a policy's own log.

    Nothing is reset, since training loops use peak counters, too: on an accelerator a phase's figure is the
    peak since the loop's own last reset (lerobot resets at the start of each step), so it grows from phase to phase,
    and the phase where it last grew sets the step's peak. On the CPU it is the process's resident memory.
    `MemoryTracker` separates phases. Costs microseconds per mark and no device synchronisation.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._counters = counters_for(self._device)
        self._host = Host()
        self._figures: dict[str, float] = {}

    def __reduce__(self) -> Any:
        # Copies and pickles measure for themselves: a handle of the process is no use to another one.
        return PhaseMemory, (self._device,)

    @property
    def has_counters(self) -> bool:
        """Return whether the figures are of device memory; otherwise they are of host memory."""
        return self._counters is not None

    def mark(self, phase: str) -> None:
        if self._counters is None:
            self._figures[f"memory/{phase}_host_rss_gib"] = self._host.rss_bytes() / GIB
        else:
            self._figures[f"memory/{phase}_peak_gib"] = self._counters.read().peak_allocated_bytes / GIB

    def mark_after_backward(self, loss: Tensor) -> None:
        """Record the memory at the end of the backward pass from `loss` as the phase `backward`."""
        if loss.requires_grad:
            queue = torch.autograd.Variable._execution_engine.queue_callback
            loss.register_hook(lambda grad: queue(partial(self.mark, "backward")))  # type: ignore[no-untyped-call]

    def figures(self) -> dict[str, float]:
        """Return each phase's newest figure in GiB: `memory/<phase>_peak_gib`, or `..._host_rss_gib` on the CPU."""
        return dict(self._figures)


class ReflowPolicy(nn.Module):
    """Mixed into a policy class of lerobot's, in front of it: an ordinary policy but for its training loss.

    With `dataset_stats`, which lerobot gives when it trains, the teacher is checked at once, with a ValueError from
    `ReflowTeacher.check`, `ReflowOptions.check_start`, or `check_processors` for the checkpoint that the student starts
    from.
    """

    config: Any
    model: Any

    def __init__(self, config: Any, dataset_stats: Any = None, **kwargs: Any) -> None:
        source = make_pair_source(config)
        # With couplings on disk the student is its own teacher, which decides whether its prefix needs a graph.
        teacher: ReflowTeacher | SelfTeacher = ReflowTeacher(config) if config.has_teacher else SelfTeacher(config)
        if dataset_stats is not None:
            if config.use_reflow:
                root = getattr(kwargs.get("dataset_meta"), "root", None)
                teacher.check(dataset_stats)
                source.check(dataset_stats, None if root is None else Path(root))
            config.check_start()
            if config.pretrained_path:
                # lerobot makes the processors next, of these very files.
                config.pretrained_path = resolve_checkpoint(config.pretrained_path, config.pretrained_revision)
                check_processors(config.pretrained_path)
        with no_remote_code():
            super().__init__(config, **kwargs)
        self.pair_source, self.teacher = source, teacher
        self.memory: PhaseMemory | None = None
        self.base: StreamedWeights | None = None
        self.offloader = ActivationOffloader(
            enabled=config.activation_offload != "off",
            mode="all" if config.activation_offload == "all" else "auto",
            budget_gib=config.activation_budget_gib,
            # The folder is the training machine's; a checkpoint is loaded on others too.
            disk=None if dataset_stats is None else config.activation_disk,
        )

    def forward(
        self, batch: dict[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None, reduction: str = "mean"
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one batch, and figures to log: `loss` or those of the policy's own, and `memory_figures`.

        Args:
            batch: observations, preprocessed; the dataset's actions are used for `reflow_real_data` only. Not modified.
            noise: `(batch, chunk, max_action_dim)`; None draws it, over the full padded width as sampling does.
            time: `(batch,)`; None draws it as `reflow_time_sampling` says.
            reduction: `"mean"`, or `"none"` for one loss per sample, `(batch,)`.
        """
        with self._autocast(), self._streamed(), self.offloader.offload_context(self):
            if self.config.use_reflow:
                loss, figures = self._reflow(batch, noise, time, reduction)
            else:
                given = {name: value for name, value in (("noise", noise), ("time", time)) if value is not None}
                loss, figures = super().forward(batch, reduction=reduction, **given)
        self._mark("forward").mark_after_backward(loss)
        return loss, {**figures, **self.memory_figures()}

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast that `dtype` asks for; the training loop of lerobot 0.6.1 does the same, around this."""
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(next(self.parameters()).device.type, torch.bfloat16)

    def _streamed(self) -> AbstractContextManager[Any]:
        """Return the context in which frozen weights stream, if they do; they begin to when the first loss is asked."""
        if self.config.vlm_home == "device":
            return nullcontext()
        if self.base is None:
            if self.config.use_reflow:
                self.teacher.load(self)  # which compares its weights with the student's
            files = folder_with_weights(self.config.pretrained_path)
            device = next(self.parameters()).device
            disk = self.config.activation_disk
            self.base = StreamedWeights(self, home=self.config.vlm_home, device=device, files=files, disk=disk)
        return self.base.stream()

    def _reflow(
        self, batch: dict[str, Tensor], noise: Tensor | None, time: Tensor | None, reduction: str
    ) -> tuple[Tensor, dict[str, float]]:
        pairs = self.pair_source.draw(self, batch, noise)
        observation = observe(self, pairs.batch)
        if time is None:
            time = sample_time(len(pairs.noise), self.config.reflow_time_sampling, pairs.noise.device)
        self.teacher.load(self)
        # The teacher's weights travel while the prefix is computed.
        self.teacher.prefetch()
        prefix = self.teacher.shared_prefix(self, observation)
        self._mark("prefix")
        if pairs.target is None:
            pairs = self.pair_source.complete(pairs, self, observation, prefix)
        if pairs.at_start is not None:
            time = torch.where(pairs.at_start, 1.0, time)
        self._mark("teacher")
        losses = self._losses(observation, prefix, pairs, time)
        loss = losses.mean()
        return (losses if reduction == "none" else loss), {"loss": loss.item()}

    def load_teacher_model(self) -> PreTrainedPolicy:
        """Return the teacher: frozen, in evaluation mode, on the host unless `teacher_offload=resident`.

        With `reflow_target=self` or `couplings_path`, the student itself.
        """
        return self.teacher.load(self)

    def generate_reflow_target(
        self,
        images: list[Tensor],
        img_masks: list[Tensor],
        lang_tokens: Tensor,
        lang_masks: Tensor,
        *state_and_noise: Tensor,
    ) -> Tensor:
        """Return the actions that the teacher's ODE reaches from the noise, `(batch, chunk, max_action_dim)`.

        Arguments as lerobot's `sample_actions` takes them, π0.5's without a state: the noise comes last. The teacher
        has left the device again when this returns. ValueError with `couplings_path`, where there is no teacher.
        """
        if self.config.couplings_path is not None:
            raise ValueError(
                f"couplings_path={self.config.couplings_path!r} has the targets; there is no teacher to ask"
            )
        *state, noise = state_and_noise
        observation = Observation(images, img_masks, lang_tokens, lang_masks, *state)
        self.teacher.load(self)
        self.teacher.prefetch()
        return self.teacher.sample(observation, noise, self.teacher.shared_prefix(self, observation))

    def memory_figures(self) -> dict[str, float]:
        """Return where memory is, in GiB, each under its name in a log; empty before the first `forward`.

        - each phase's as `PhaseMemory` has them: `prefix` and `teacher` with `use_reflow`; `forward`; `backward` and
          `optimizer`, which inside `forward` are those of the batch before.
        - `memory/teacher_own_gib`: the teacher's own weights, wherever they live; on an accelerator
          `memory/teacher_device_gib`, the most of them that was on it at once.
        - `memory/frozen_device_gib`: the most of the frozen weights that was on the device at once, with `vlm_home`.
        - `memory/offload_host_gib`: host memory that holds activations, with `activation_offload`; with
          `activation_disk` also `memory/offload_disk_gib`, the length of its file.
        """
        if self.memory is None:
            return {}
        figures, report = self.memory.figures(), self.teacher.report()
        if report is not None:
            figures["memory/teacher_own_gib"] = report.own_bytes / GIB
        if report is not None and self.memory.has_counters:
            figures["memory/teacher_device_gib"] = report.peak_device_bytes / GIB
        if self.base is not None:
            figures["memory/frozen_device_gib"] = self.base.report().peak_device_bytes / GIB
        if self.offloader.enabled:
            stats = self.offloader.stats
            figures["memory/offload_host_gib"] = stats.host_bytes_pinned / GIB
            if stats.disk_bytes_written:
                figures["memory/offload_disk_gib"] = stats.disk_bytes_held / GIB
        return figures

    def update(self) -> None:
        """Bring the teacher back: lerobot calls this after each optimizer step, when the activations are gone."""
        self._mark("optimizer")
        if self.config.use_reflow:
            self.teacher.prefetch()

    def _losses(self, observation: Observation, prefix: SharedPrefix | None, pairs: Pairs, time: Tensor) -> Tensor:
        assert pairs.target is not None
        num_action_dims, kind = self.config.action_feature.shape[0], self.config.reflow_loss
        if prefix is None:
            squared = self.model.forward(*observation.arguments(), pairs.target, pairs.noise, time)
            return chunk_loss(squared[..., :num_action_dims], kind, pairs.valid)
        x_t = interpolate(pairs.noise, pairs.target, time)
        velocity = flow_of(self.config).expert(self.model, prefix).velocity(x_t, time)
        return reflow_loss(velocity, pairs.noise, pairs.target, num_action_dims, kind, pairs.valid)

    def _mark(self, phase: str) -> PhaseMemory:
        if self.memory is None:
            self.memory = PhaseMemory(next(self.parameters()).device)
        self.memory.mark(phase)
        return self.memory
