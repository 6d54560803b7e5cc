"""Canaries of the project in the SmolVLA model and in transformers' caches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from reliance import MODELING, PREFIX, RECIPE, TEACHER, relied_on_by

flow_matching = LateModule("lerobot.policies.common.flow_matching")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")
smolvlm_with_expert = LateModule("lerobot.policies.smolvla.smolvlm_with_expert")
lerobot_train = LateModule("lerobot.scripts.lerobot_train")
cache_utils = LateModule("transformers.cache_utils")


@pytest.fixture(scope="module")
def policy(toy_teacher: Path) -> modeling_smolvla.SmolVLAPolicy:
    return modeling_smolvla.SmolVLAPolicy.from_pretrained(toy_teacher, strict=True)


def prefix_of(policy: modeling_smolvla.SmolVLAPolicy, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    batch = state.shape[0]
    images = [torch.zeros(batch, 3, 32, 32)]
    tokens = torch.arange(1, 7).expand(batch, -1)
    masks = [torch.ones(batch, dtype=torch.bool)], tokens, torch.ones(batch, 6, dtype=torch.bool)
    with torch.no_grad():
        embedded: tuple[torch.Tensor, ...] = policy.model.embed_prefix(images, *masks, state=state)
    return embedded


@pytest.mark.parametrize(
    ("function", "names", "module"),
    [
        (lambda: modeling_smolvla.SmolVLAPolicy.forward, "self batch noise time reduction", MODELING),
        (lambda: modeling_smolvla.SmolVLAPolicy.__init__, "self config", MODELING),
        (lambda: modeling_smolvla.SmolVLAPolicy.prepare_images, "self batch", MODELING),
        (lambda: modeling_smolvla.SmolVLAPolicy.prepare_state, "self batch", MODELING),
        (
            lambda: modeling_smolvla.VLAFlowMatching.embed_prefix,
            "self images img_masks lang_tokens lang_masks state",
            PREFIX,
        ),
        (
            lambda: modeling_smolvla.VLAFlowMatching.denoise_step,
            "self prefix_pad_masks past_key_values x_t timestep",
            PREFIX,
        ),
        (
            lambda: modeling_smolvla.VLAFlowMatching.sample_actions,
            "self images img_masks lang_tokens lang_masks state noise",
            TEACHER,
        ),
        (
            lambda: modeling_smolvla.VLAFlowMatching.forward,
            "self images img_masks lang_tokens lang_masks state actions noise time",
            MODELING,
        ),
        (lambda: modeling_smolvla.VLAFlowMatching.sample_noise, "self shape device", MODELING),
        (
            lambda: smolvlm_with_expert.SmolVLMWithExpertModel.forward,
            "self attention_mask position_ids past_key_values inputs_embeds use_cache",
            PREFIX,
        ),
        (lambda: flow_matching.euler_integrate, "denoise_fn noise num_steps", PREFIX),
        (lambda: smolvlm_with_expert.apply_rope, "x positions", PREFIX),
        (
            lambda: lerobot_train.update_policy,
            "train_metrics policy batch optimizer grad_clip_norm accelerator",
            RECIPE,
        ),
    ],
)
def test_leading_parameters(function: Callable[[], Any], names: str, module: str) -> None:
    with relied_on_by(module):
        parameters = list(inspect.signature(inspect.unwrap(function())).parameters)
        assert parameters[: len(names.split())] == names.split()


def test_state_token_is_the_last_of_the_prefix(policy: modeling_smolvla.SmolVLAPolicy) -> None:
    first, second = (prefix_of(policy, torch.full((1, 4), value)) for value in (0.0, 1.0))
    with relied_on_by(PREFIX):
        assert torch.equal(first[0][:, :-1], second[0][:, :-1])
        assert not torch.equal(first[0][:, -1], second[0][:, -1])
        # Images and language attend neither to the state nor to actions.
        assert first[2].int().tolist() == [[0] * (first[0].shape[1] - 1) + [1]]


def test_prefix_pass_fills_a_cache_of_dynamic_layers(policy: modeling_smolvla.SmolVLAPolicy) -> None:
    embeddings, masks, _ = prefix_of(policy, torch.zeros(2, 4))
    length = embeddings.shape[1]
    with relied_on_by(PREFIX), torch.no_grad():
        _, cache = policy.model.vlm_with_expert.forward(
            attention_mask=masks[:, None].expand(-1, length, -1),
            position_ids=masks.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embeddings, None],
            use_cache=True,
        )
        text_model = policy.model.vlm_with_expert.get_vlm_model().text_model
        assert len(cache.layers) == len(text_model.layers) == policy.config.num_vlm_layers
        for layer in cache.layers:
            assert type(layer) is cache_utils.DynamicLayer
            assert layer.keys.shape == layer.values.shape == (2, 2, length, 16)


def test_vlm_layers_have_the_parts_that_the_state_token_passes(policy: modeling_smolvla.SmolVLAPolicy) -> None:
    with relied_on_by(PREFIX):
        for layer in policy.model.vlm_with_expert.get_vlm_model().text_model.layers:
            assert {name for name, _ in layer.named_children()} == {
                "self_attn",
                "mlp",
                "input_layernorm",
                "post_attention_layernorm",
            }
            projections = {name for name, _ in layer.self_attn.named_children()}
            assert projections == {"q_proj", "k_proj", "v_proj", "o_proj"}
            assert layer.self_attn.q_proj.bias is None
            assert layer.self_attn.head_dim == 16


def test_dynamic_layer_can_be_filled_by_hand() -> None:
    with relied_on_by(PREFIX):
        keys = torch.randn(1, 2, 3, 4)
        layer = cache_utils.DynamicLayer()
        assert {"keys", "values", "is_initialized"} <= vars(layer).keys()
        layer.keys, layer.values = keys, keys
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        cache = cache_utils.DynamicCache()
        cache.layers = [layer]
        longer, _ = cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
        assert longer.shape[2] == 4
        cache.crop(3)
        assert torch.equal(cache.layers[0].keys, keys)


def test_euler_goes_from_noise_at_one_to_actions_at_zero() -> None:
    times = []

    def velocity(x_t: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        times.append(time.tolist())
        return torch.full_like(x_t, 2)

    with relied_on_by(PREFIX):
        assert flow_matching.euler_integrate(velocity, torch.ones(2, 1), 4).tolist() == [[-1], [-1]]
        assert times == [[1, 1], [0.75, 0.75], [0.5, 0.5], [0.25, 0.25]]


def test_rope_treats_each_token_alone() -> None:
    tokens, positions = torch.randn(2, 5, 3, 8), torch.arange(5).expand(2, -1)
    with relied_on_by(PREFIX):
        alone = smolvlm_with_expert.apply_rope(tokens[:, -1:], positions[:, -1:])
        torch.testing.assert_close(smolvlm_with_expert.apply_rope(tokens, positions)[:, -1:], alone)


def test_writing_through_data_leaves_the_version_alone() -> None:
    with relied_on_by(PREFIX):
        weight = torch.ones(2, requires_grad=True)
        rows = torch.ones(2)
        product = rows * weight  # saves rows
        rows.data[1:] = 5
        product.sum().backward()
        assert weight.grad is not None
