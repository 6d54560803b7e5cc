"""Policy type `smolvla_reflow`: a SmolVLA student that learns straight paths from a teacher's couplings.

The student is an ordinary SmolVLA: same weights, same checkpoint keys, same inference. Only the training loss differs.
"""

from typing import Any

from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from torch import Tensor

from hf_memopt.integrations.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.integrations.lerobot.prefix import ConditionedExpert, Observation, SharedPrefix, observe
from hf_memopt.integrations.lerobot.teacher import ReflowTeacher
from hf_memopt.memory import PhaseMemory
from hf_memopt.reflow import interpolate, reflow_loss, sample_time
from hf_memopt.teacher import TeacherReport


class SmolVLAReflowPolicy(SmolVLAPolicy):
    """SmolVLA whose `forward` is the reflow loss while `use_reflow` is set, and the stock loss otherwise.

    Args:
        config: the student's, with the teacher's path.
        dataset_stats: given by lerobot when it trains; then the teacher is checked at once.

    Raises:
        ValueError: see `ReflowTeacher.check`.
    """

    config_class = SmolVLAReflowConfig
    name = "smolvla_reflow"

    def __init__(self, config: SmolVLAReflowConfig, dataset_stats: Any = None, **kwargs: Any) -> None:
        teacher = ReflowTeacher(config)
        if config.use_reflow and dataset_stats is not None:
            teacher.check(dataset_stats)
        super().__init__(config, **kwargs)
        # No nn.Module, so that parameters(), state_dict(), train() and to() do not see the teacher.
        self._teacher = teacher
        self.memory: PhaseMemory | None = None

    def forward(
        self, batch: dict[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None, reduction: str = "mean"
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of one batch.

        Args:
            batch: observations, preprocessed; the dataset's actions are not used. Not modified.
            noise: `(batch, chunk, max_action_dim)`; None draws it, over the full padded width as sampling does.
            time: `(batch,)`; None draws it as `reflow_time_sampling` says.
            reduction: `"mean"`, or `"none"` for one loss per sample, `(batch,)`.

        Returns:
            The loss, and figures to log: `loss`, memory by phase (see `PhaseMemory`) and the teacher's traffic.
        """
        if not self.config.use_reflow:
            return super().forward(batch, noise=noise, time=time, reduction=reduction)  # type: ignore[no-any-return]
        observation = observe(self, batch)
        batch_size, device = observation.state.shape[0], observation.state.device
        if noise is None:
            noise = self.model.sample_noise((batch_size, self.config.chunk_size, self.config.max_action_dim), device)
        if time is None:
            time = sample_time(batch_size, self.config.reflow_time_sampling, device)
        losses = self._reflow_losses(observation, noise, time)
        loss = losses.mean()
        return (losses if reduction == "none" else loss), {"loss": loss.item(), **self._figures()}

    def load_teacher_model(self) -> SmolVLAPolicy:
        """The teacher: frozen, in evaluation mode, at home on the host unless `teacher_offload=resident`."""
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
        """
        observation = Observation(images, img_masks, lang_tokens, lang_masks, state)
        return self._teacher.sample(observation, noise, self._shared_prefix(observation))

    def teacher_report(self) -> TeacherReport | None:
        """What the teacher costs, or None before it was used."""
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
        self.load_teacher_model()
        self._teacher.prefetch()
        return SharedPrefix(self.model, observation) if self._teacher.shares_prefix else None

    def _reflow_losses(self, observation: Observation, noise: Tensor, time: Tensor) -> Tensor:
        """Per-sample losses. The target comes first, so that the teacher never meets the student's activations."""
        prefix = self._shared_prefix(observation)
        self._mark("prefix")
        target = self._teacher.sample(observation, noise, prefix)
        self._mark("teacher")
        num_action_dims = self.config.action_feature.shape[0]
        if prefix is None:
            squared = self.model.forward(*observation.arguments(), target, noise, time)
            losses: Tensor = squared[..., :num_action_dims].mean(dim=(1, 2))
        else:
            velocity = ConditionedExpert(self.model, prefix).velocity(interpolate(noise, target, time), time)
            losses = reflow_loss(velocity, noise, target, num_action_dims)
        self._mark("forward")
        return losses

    def _mark(self, phase: str) -> None:
        if self.memory is None:
            self.memory = PhaseMemory(next(self.parameters()).device)
        self.memory.mark(phase)

    def _figures(self) -> dict[str, float]:
        report = self.teacher_report()
        assert self.memory is not None
        assert report is not None
        return {**self.memory.figures(), "teacher_own_gib": (report.host_bytes or report.device_bytes) / 2**30}
