"""The prefix of π0 and π0.5, computed once for student and teacher.

π0's state is a token of the expert's, so that its prefix is images and language alone. π0.5's processor writes the
state into the instruction, and its expert gets the time through its norms instead of its tokens. In both, a frozen VLM
leaves nothing of the prefix to one model, and lerobot's own sampling runs the VLM on it separately. lerobot's joint
forward takes the tokens of VLM and expert through each layer together, which makes the whole VLM a part of the autograd
graph.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.constants import SAFETENSORS_SINGLE_FILE
from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi0.modeling_pi0 import PI0Policy, PI0Pytorch
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.modeling_pi05 import PI05Policy, PI05Pytorch
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_memopt.lerobot.flow.flow_policy import ConditionedExpert, FlowPolicy, Observation, SharedPrefix

type Config = PI0Config | PI05Config
type Policy = PI0Policy | PI05Policy
type Model = PI0Pytorch | PI05Pytorch

# lerobot leaves these in float32 when it makes either policy bfloat16.
_FLOAT32 = ("input_layernorm", "post_attention_layernorm", "model.norm")


class Pi0Prefix(SharedPrefix):
    """Computes the keys and values of the image and language tokens of one batch, `(batch, heads, tokens, dim)` each.

    Memory: `2 * layers * batch * tokens * kv_heads * head_dim` elements; nothing is saved for backward.
    """

    def __init__(self, model: Model, observation: Observation) -> None:
        self.state = observation.state
        both = model.paligemma_with_expert
        with torch.no_grad():
            embeddings, self.pad_masks, attention = model.embed_prefix(*observation.arguments()[:4])
            visible = make_att_2d_masks(self.pad_masks, attention)
            # As lerobot does: other implementations do not take its additive masks.
            both.paligemma.model.language_model.config._attn_implementation = "eager"
            _, cache = both.forward(
                attention_mask=prepare_attention_masks_4d(visible),
                position_ids=torch.cumsum(self.pad_masks, dim=1) - 1,
                past_key_values=None,
                inputs_embeds=[embeddings, None],
                use_cache=True,
            )
        self.keys = [layer.keys for layer in cache.layers]
        self.values = [layer.values for layer in cache.layers]


class Pi0Expert(ConditionedExpert):
    """Evaluates a velocity field, given a shared prefix, which is cast to the expert's dtype where that is another."""

    def __init__(self, model: Model, prefix: Pi0Prefix) -> None:
        self._model = model
        keys, values = prefix.keys, prefix.values
        if not torch.is_autocast_enabled(prefix.pad_masks.device.type):
            dtype = model.paligemma_with_expert.gemma_expert.model.layers[0].self_attn.k_proj.weight.dtype
            keys, values = ([tensor.to(dtype) for tensor in tensors] for tensors in (keys, values))
        # As a cache of lerobot's yields them. It copies them for each step, since the expert appends its own.
        layers = [(key, value, None) for key, value in zip(keys, values, strict=True)]
        self._given: dict[str, Any] = {"prefix_pad_masks": prefix.pad_masks, "past_key_values": layers}
        if prefix.state is not None:
            self._given["state"] = prefix.state

    def velocity(self, x_t: Tensor, time: Tensor) -> Tensor:
        return self._model.denoise_step(**self._given, x_t=x_t, timestep=time)


class Pi0Flow(FlowPolicy):
    """π0: its state is a token of the expert's, and `dtype` is the dtype of its weights."""

    stock_type = "pi0"
    title = "π0"
    policy_class: ClassVar[type[Policy]] = PI0Policy
    state_is_token: ClassVar[bool] = True
    steps_field = "num_inference_steps"
    vlm_path = "paligemma_with_expert.paligemma"
    vlm_field = "paligemma_variant"
    prefix = Pi0Prefix
    expert = Pi0Expert
    architecture_fields = (
        "paligemma_variant",
        "action_expert_variant",
        "chunk_size",
        "max_state_dim",
        "max_action_dim",
        "image_resolution",
        "empty_cameras",
        "use_relative_actions",
        "relative_exclude_joints",
        "min_period",
        "max_period",
    )

    def load(self, folder: Path, config: Config) -> Policy:
        policy = self.policy_class(config)
        load_pi0_weights(policy, folder)
        return policy.eval()

    def settings_of_teacher(self, config: Config) -> dict[str, Any]:
        # Rounded as the student's, both have the same VLM; to another dtype, only the expert is cast, later.
        same = getattr(config, "teacher_dtype", None) == config.dtype
        return {"gradient_checkpointing": False, **({"dtype": config.dtype} if same else {})}

    def observe(self, policy: Policy, batch: Mapping[str, Tensor]) -> Observation:
        images, image_masks = policy._preprocess_images(batch)
        tokens, token_masks = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
        state = policy.prepare_state(batch) if self.state_is_token else None
        return Observation(images, image_masks, tokens, token_masks, state)

    def transformer(self, model: Model, with_vlm: bool) -> list[nn.Parameter]:
        both = model.paligemma_with_expert
        parts = [both.gemma_expert, *([both.paligemma.model.language_model] if with_vlm else [])]
        return [
            weight
            for part in parts
            for name, weight in part.named_parameters(prefix="model")
            if not any(kept in name for kept in _FLOAT32)
        ]

    def leave_out_unused(self, model: Model) -> None:
        # An output layer over the whole vocabulary: 263 M weights of the expert's.
        model.paligemma_with_expert.gemma_expert.lm_head = None

    def why_not_shareable(self, config: Config) -> str | None:
        if config.gradient_checkpointing:
            return (
                "gradient_checkpointing recomputes the joint forward (--policy.gradient_checkpointing=false would not)"
            )
        return None


class Pi05Flow(Pi0Flow):
    """π0.5: its state is a part of the instruction, in 256 bins for each dimension; all else is as in π0."""

    stock_type = "pi05"
    title = "π0.5"
    policy_class = PI05Policy
    state_is_token = False


def load_pi0_weights(policy: Policy, folder: Path) -> None:
    """Load weights strictly, with openpi's names translated; lerobot's `from_pretrained` goes on with random values."""
    weights = policy._fix_pytorch_state_dict_keys(load_file(folder / SAFETENSORS_SINGLE_FILE), policy.config)
    named = {name if name.startswith("model.") else f"model.{name}": weight for name, weight in weights.items()}
    policy.load_state_dict(named, strict=True)
