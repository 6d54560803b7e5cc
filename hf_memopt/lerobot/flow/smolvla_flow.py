"""SmolVLA's prefix, computed once for student and teacher.

Image and language tokens attend neither to the state token nor to the actions, so with a frozen VLM their keys and
values need no gradient and depend on nothing that is trained. lerobot's joint forward shares each attention between
expert and VLM tokens, which makes the whole VLM stream part of the autograd graph. Here the stream runs once without a
graph, the one state token passes through the VLM per model (with gradient, if its projection is trained), and the
expert attends to both through the cache that lerobot's sampling uses.

    keys and values of a layer:   image tokens | language tokens | state token
                                  once, shared by both models    | each model's own, in the free last row
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.common.vla_utils import make_att_2d_masks
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy, VLAFlowMatching
from lerobot.policies.smolvla.smolvlm_with_expert import apply_rope
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_memopt.lerobot.flow.flow_policy import ConditionedExpert, FlowPolicy, Observation, SharedPrefix


class SmolVLAPrefix(SharedPrefix):
    """Computes the keys and values of the image and language tokens of one batch.

    Memory: `2 * num_vlm_layers * batch * (tokens + 1) * kv_heads * head_dim` elements; nothing is saved for backward.
    """

    def __init__(self, model: VLAFlowMatching, observation: Observation) -> None:
        self.state = observation.state
        with torch.no_grad():
            embeddings, self.pad_masks, attention = model.embed_prefix(*observation.arguments()[:4], state=self.state)
            self.positions = torch.cumsum(self.pad_masks, dim=1) - 1
            length = embeddings.shape[1] - 1  # without the state token, which comes last
            _, cache = model.vlm_with_expert.forward(
                attention_mask=make_att_2d_masks(self.pad_masks, attention)[:, :length, :length],
                position_ids=self.positions[:, :length],
                past_key_values=None,
                inputs_embeds=[embeddings[:, :length], None],
                use_cache=True,
            )
            self.keys, self.values = [], []
            for layer in cache.layers:
                self.keys.append(_with_free_row(layer.keys))
                self.values.append(_with_free_row(layer.values))
                # Layer by layer, so that never all of the cache is there twice.
                layer.keys = layer.values = None
        self._rows_taken = False

    def take_rows(self) -> None:
        """Give the free rows to one graph's state token; RuntimeError for another, whose gradients would be wrong."""
        if self._rows_taken:
            raise RuntimeError("a shared prefix serves one backward pass; compute another prefix for a second forward")
        self._rows_taken = True


class SmolVLAExpert(ConditionedExpert):
    """Evaluates a model's velocity field, given a shared prefix and the model's own state token; see `take_rows`."""

    def __init__(self, model: VLAFlowMatching, prefix: SmolVLAPrefix) -> None:
        self._model = model
        self._pad_masks = prefix.pad_masks
        self._keys, self._values = _run_state_token(model, prefix)

    def velocity(self, x_t: Tensor, time: Tensor) -> Tensor:
        return self._model.denoise_step(
            prefix_pad_masks=self._pad_masks, past_key_values=self._cache(), x_t=x_t, timestep=time
        )

    def _cache(self) -> DynamicCache:
        # A new cache for each step: lerobot appends the action tokens to some layers and crops them off again.
        cache = DynamicCache()
        for keys, values in zip(self._keys, self._values, strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values = keys.transpose(1, 2), values.transpose(1, 2)
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
            cache.layers.append(layer)
        return cache


def _with_free_row(cached: Tensor) -> Tensor:
    """Copy (batch, heads, tokens, dim) to a new (batch, tokens + 1, heads, dim) whose last row is undefined."""
    batch, heads, tokens, dim = cached.shape
    rows = cached.new_empty(batch, tokens + 1, heads, dim)
    rows[:, :-1].copy_(cached.transpose(1, 2))
    return rows


def _run_state_token(model: VLAFlowMatching, prefix: SmolVLAPrefix) -> tuple[list[Tensor], list[Tensor]]:
    """Complete the prefix's keys and values, (batch, tokens + 1, heads, dim) each, by the model's state token.

    The token passes through the VLM's layers as lerobot's joint forward would take it there, alone: it attends to the
    prefix and to itself, and nothing of the prefix attends to it.
    """
    hidden = model.state_proj(prefix.state)[:, None]
    position = prefix.positions[:, -1:]
    visible = prefix.pad_masks[:, :-1]
    # With a gradient, the token is written into the prefix's own rows (see `_append`), which works once.
    if torch.is_grad_enabled() and hidden.requires_grad:
        prefix.take_rows()
    layers = model.vlm_with_expert.get_vlm_model().text_model.layers
    keys, values = [], []
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden).to(attention.q_proj.weight.dtype)
        shape = (*normed.shape[:-1], -1, attention.head_dim)
        query = apply_rope(attention.q_proj(normed).view(shape), position)
        key = apply_rope(attention.k_proj(normed).view(shape), position)
        value = attention.v_proj(normed).view(shape)
        keys.append(_append(prefix.keys[index], key))
        values.append(_append(prefix.values[index], value))
        if index == len(layers) - 1:
            break  # the last layer's result for the token is not read
        mixed = _attend(query, key, value, prefix.keys[index][:, :-1], prefix.values[index][:, :-1], visible)
        # lerobot adds the residual in place, so the projection's dtype wins (under autocast, or in a bf16 VLM).
        mixed = attention.o_proj(mixed.to(attention.o_proj.weight.dtype))
        hidden = (mixed + hidden).to(mixed.dtype)
        hidden = layer.mlp(layer.post_attention_layernorm(hidden)) + hidden
    return keys, values


def _attend(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Make one token attend to a prefix and itself, in float32 as lerobot computes it.

    Products and sums instead of matmuls: a matmul would copy the prefix per layer, and autograd would keep the copy.
    query (batch, 1, heads, dim); key, value (batch, 1, kv_heads, dim); keys, values (batch, tokens, kv_heads, dim).
    """
    batch, _, kv_heads, dim = keys.shape
    query = query.view(batch, 1, kv_heads, -1, dim).float() * dim**-0.5
    to_prefix = (query * keys[:, :, :, None]).sum(-1)  # (batch, tokens, kv_heads, group)
    to_prefix = to_prefix.masked_fill(~visible[:, :, None, None], torch.finfo(torch.float32).min)
    to_itself = (query * key[:, :, :, None]).sum(-1)
    weights = torch.cat([to_prefix, to_itself], dim=1).softmax(dim=1).to(values.dtype)[..., None]
    mixed = (weights[:, :-1] * values[:, :, :, None]).sum(1, keepdim=True) + weights[:, -1:] * value[:, :, :, None]
    return mixed.reshape(batch, 1, -1)


def _append(rows: Tensor, token: Tensor) -> Tensor:
    """Return the prefix's rows followed by the token, (batch, tokens + 1, heads, dim).

    A teacher gets a copy of the prefix for its sampling. A student would keep its copy until backward, in every layer,
    so its token goes into the rows that are there.
    """
    token = token.to(rows.dtype)
    if torch.is_grad_enabled() and token.requires_grad:
        return _FillLastRow.apply(rows, token)  # type: ignore[no-untyped-call]
    return torch.cat([rows[:, :-1], token], dim=1)


class _FillLastRow(torch.autograd.Function):
    """Writes a token into the free last row and returns the rows, now with a gradient for the token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor) -> Tensor:
        # The write bypasses autograd's version counter on purpose. `_attend` saved these rows for backward without the
        # last row, so that writing that row changes no saved tensor.
        rows.data[:, -1:].copy_(token)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad[:, -1:]


class SmolVLAFlow(FlowPolicy):
    """SmolVLA: its state is a token of the VLM's, behind images and language."""

    stock_type = "smolvla"
    title = "SmolVLA"
    steps_field = "num_steps"
    vlm_path = "vlm_with_expert.vlm"
    vlm_field = "vlm_model_name"
    prefix = SmolVLAPrefix
    expert = SmolVLAExpert
    architecture_fields = (
        "chunk_size",
        "max_state_dim",
        "max_action_dim",
        "resize_imgs_with_padding",
        "empty_cameras",
        "adapt_to_pi_aloha",
        "attention_mode",
        "prefix_length",
        "add_image_special_tokens",
        "num_vlm_layers",
        "num_expert_layers",
        "self_attn_every_n_layers",
        "expert_width_multiplier",
        "min_period",
        "max_period",
    )

    def load(self, folder: Path, config: SmolVLAConfig) -> SmolVLAPolicy:
        # lerobot would fetch the VLM's weights only to replace them.
        config.load_vlm_weights = False
        return SmolVLAPolicy.from_pretrained(folder, config=config, strict=True)

    def settings_of_teacher(self, config: SmolVLAConfig) -> dict[str, Any]:
        return {"vlm_model_name": config.vlm_model_name}

    def observe(self, policy: SmolVLAPolicy, batch: Mapping[str, Tensor]) -> Observation:
        if policy.config.adapt_to_pi_aloha:  # lerobot's conversion writes into its argument
            batch = {**batch, OBS_STATE: policy._pi_aloha_decode_state(batch[OBS_STATE].clone())}
        images, image_masks = policy.prepare_images(batch)
        tokens, token_masks = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
        return Observation(images, image_masks, tokens, token_masks, policy.prepare_state(batch))

    def demonstrated_actions(self, policy: SmolVLAPolicy, batch: Mapping[str, Tensor]) -> Tensor:
        if policy.config.adapt_to_pi_aloha:  # lerobot's conversion writes into its argument
            batch = {ACTION: policy._pi_aloha_encode_actions_inv(batch[ACTION].clone())}
        return super().demonstrated_actions(policy, batch)

    def transformer(self, model: VLAFlowMatching, with_vlm: bool) -> list[nn.Parameter]:
        part = model.vlm_with_expert if with_vlm else model.vlm_with_expert.lm_expert
        return list(part.parameters())

    def why_not_shareable(self, config: SmolVLAConfig) -> str | None:
        if config.prefix_length > 0:
            return "prefix_length pads behind the state token (--policy.prefix_length=-1 would not)"
        return None

    def check_teacher(self, folder: Path, config: SmolVLAConfig) -> None:
        if not config.use_cache:
            raise ValueError(f"the teacher's config in {folder} has use_cache=false; SmolVLA cannot sample without it")
