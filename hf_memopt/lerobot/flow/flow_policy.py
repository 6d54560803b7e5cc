"""The seam between reflow and a flow-matching policy of lerobot: one adapter per policy, and nothing else differs.

Such a policy has images, language and a state as its observation, a VLM that reads them, an expert that turns noise
into actions by Euler steps, and time 1 for noise. Its `model` has lerobot's methods `forward`, `sample_actions` and
`sample_noise`, which take an observation in the order of `Observation.arguments`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.common.flow_matching import euler_integrate
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION
from torch import Tensor, nn


@dataclass(frozen=True)
class Observation:
    """The observation that both models see, prepared once."""

    images: list[Tensor]  # of each camera (batch, 3, height, width) in [-1, 1]
    image_masks: list[Tensor]  # of each camera (batch,) bool, False where it is missing
    tokens: Tensor  # (batch, length), of language
    token_masks: Tensor  # (batch, length) bool, False on padding
    state: Tensor | None = None  # (batch, max_state_dim); None for a policy that reads it as language tokens

    def arguments(self) -> tuple[Any, ...]:
        """Return all in the order in which lerobot's model methods take them."""
        read = (self.images, self.image_masks, self.tokens, self.token_masks)
        return read if self.state is None else (*read, self.state)


class SharedPrefix(ABC):
    """Keys and values of the image and language tokens of one batch, one tensor per layer, without a graph."""

    keys: list[Tensor]
    values: list[Tensor]

    @abstractmethod
    def __init__(self, model: nn.Module, observation: Observation) -> None: ...

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


class ConditionedExpert(ABC):
    """A model's velocity field, given the prefix of a batch, which a VLM with the same weights computed.

    Gradients flow to all that the model trains outside its VLM. The teacher goes first.
    """

    @abstractmethod
    def __init__(self, model: nn.Module, prefix: Any) -> None: ...

    @abstractmethod
    def velocity(self, x_t: Tensor, time: Tensor) -> Tensor:
        """Return the velocity at `x_t` `(batch, chunk, max_action_dim)` and `time` `(batch,)`, in float32."""

    def sample(self, noise: Tensor, num_steps: int) -> Tensor:
        return euler_integrate(self.velocity, noise, num_steps)

    def couple(
        self, noise: Tensor, actions: Tensor, from_actions: Tensor, num_steps: int, num_action_dims: int
    ) -> tuple[Tensor, Tensor]:
        """Find both ends of the ODE's paths, of each sample from the end that is given: all noise and all actions.

        Args:
            noise: `(batch, chunk, max_action_dim)`. Where a path starts from it, its end is found as `sample` does.
            actions: `(batch, chunk, max_action_dim)`, zero in the padded dimensions. Where a path starts from them,
                their noise is found by Euler steps the other way ("forward pairs" in arXiv 2405.20320).
            from_actions: `(batch,)` bool, which paths start from the actions.
            num_steps: Euler steps.
            num_action_dims: dimensions that the robot has. lerobot trains no velocity in the others; from the actions
                they follow the line to their own `noise`, which is where they are in its training.
        """
        backwards = from_actions[:, None, None]
        x = torch.where(backwards, actions, noise)
        for step in range(num_steps):
            # Time 1 is noise: some samples of the batch go from 0 upwards, the others from 1 downwards.
            time = torch.where(from_actions, step / num_steps, 1 - step / num_steps)
            velocity = self.velocity(x, time)
            outward = torch.cat([velocity[..., :num_action_dims], noise[..., num_action_dims:]], dim=-1)
            x = x + torch.where(backwards, outward, -velocity) / num_steps
        return torch.where(backwards, x, noise), torch.where(backwards, actions, x)


class FlowPolicy(ABC):
    """The properties and functions of one policy that reflow needs."""

    stock_type: ClassVar[str]  # lerobot's name for it; the student's is the same with `_reflow` behind it
    title: ClassVar[str]  # its name in prose
    steps_field: ClassVar[str]  # field of its configuration for the number of Euler steps
    vlm_path: ClassVar[str]  # name of the model's part that student and teacher share
    vlm_field: ClassVar[str]  # field by which a configuration names its VLM
    prefix: ClassVar[type[SharedPrefix]]  # made of images and language by the VLM
    expert: ClassVar[type[ConditionedExpert]]  # the velocity field behind it
    # Fields that decide the shape, the meaning or the conditioning of the velocity field, in student and teacher alike.
    architecture_fields: ClassVar[tuple[str, ...]]

    @abstractmethod
    def load(self, folder: Path, config: PreTrainedConfig) -> PreTrainedPolicy:
        """Return a checkpoint's policy in evaluation mode; RuntimeError if the weights do not fit the configuration."""

    @abstractmethod
    def settings_of_teacher(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the fields that a teacher's configuration takes from its student's, beside the number of steps."""

    @abstractmethod
    def observe(self, policy: PreTrainedPolicy, batch: Mapping[str, Tensor]) -> Observation:
        """Prepare a preprocessed batch as the policy's model takes it. The batch is not modified."""

    def demonstrated_actions(self, policy: PreTrainedPolicy, batch: Mapping[str, Tensor]) -> Tensor:
        """Prepare a preprocessed batch's actions as the policy's model takes them, `(batch, chunk, max_action_dim)`."""
        return policy.prepare_action({ACTION: batch[ACTION]})

    def vlm(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self.vlm_path)

    @abstractmethod
    def transformer(self, model: nn.Module, with_vlm: bool) -> list[nn.Parameter]:
        """Return the weights that `teacher_dtype` casts: without the projections around them."""

    @abstractmethod
    def why_not_shareable(self, config: PreTrainedConfig) -> str | None:
        """Return the setting that keeps a frozen VLM's prefix from being computed once, if any."""

    def leave_out_unused(self, model: nn.Module) -> None:  # noqa: B027
        """Drop the weights of a teacher's model that sampling does not read."""

    def check_teacher(self, folder: Path, config: PreTrainedConfig) -> None:  # noqa: B027
        """Raise a ValueError if a policy with this configuration cannot be a teacher."""
