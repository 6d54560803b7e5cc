"""Canaries of the project in lerobot's π0 and π0.5."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from reliance import PI0, PI0_MODELING, PROCESSORS, relied_on_by
from safetensors.torch import load_file, save_file

processors = LateModule("hf_memopt.lerobot.files.checkpoint_files")
vla_utils = LateModule("lerobot.policies.common.vla_utils")
known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
policies = LateModule("lerobot.policies")
modeling_pi0 = LateModule("lerobot.policies.pi0.modeling_pi0")
modeling_pi05 = LateModule("lerobot.policies.pi05.modeling_pi05")
pi0_toys = LateModule("pi0_toys")


@pytest.fixture(params=["pi0", "pi05"])
def kind(request: pytest.FixtureRequest) -> Any:
    return pi0_toys.KINDS[request.param]


@pytest.fixture
def policy(kind: Any, toy_vlm: Path) -> Iterator[Any]:
    with pi0_toys.toy_sizes(toy_vlm, kind.policy.name):
        yield kind.policy(kind.config(**pi0_toys.settings()))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda: modeling_pi0.PI0Policy._preprocess_images, "self batch"),
        (lambda: modeling_pi0.PI0Policy.prepare_state, "self batch"),
        (lambda: modeling_pi0.PI0Policy.prepare_action, "self batch"),
        (lambda: modeling_pi0.PI0Policy._fix_pytorch_state_dict_keys, "self state_dict model_config"),
        (lambda: modeling_pi0.PI0Pytorch.embed_prefix, "self images img_masks lang_tokens lang_masks"),
        (
            lambda: modeling_pi0.PI0Pytorch.forward,
            "self images img_masks lang_tokens lang_masks state actions noise time",
        ),
        (
            lambda: modeling_pi0.PI0Pytorch.sample_actions,
            "self images img_masks lang_tokens lang_masks state noise",
        ),
        (
            lambda: modeling_pi0.PI0Pytorch.denoise_step,
            "self state prefix_pad_masks past_key_values x_t timestep",
        ),
        (lambda: modeling_pi0.PI0Pytorch.sample_noise, "self shape device"),
        (lambda: modeling_pi05.PI05Policy._preprocess_images, "self batch"),
        (lambda: modeling_pi05.PI05Policy.prepare_action, "self batch"),
        (lambda: modeling_pi05.PI05Policy._fix_pytorch_state_dict_keys, "self state_dict model_config"),
        (lambda: modeling_pi05.PI05Pytorch.embed_prefix, "self images img_masks tokens masks"),
        (lambda: modeling_pi05.PI05Pytorch.forward, "self images img_masks tokens masks actions noise time"),
        (lambda: modeling_pi05.PI05Pytorch.sample_actions, "self images img_masks tokens masks noise"),
        (lambda: modeling_pi05.PI05Pytorch.denoise_step, "self prefix_pad_masks past_key_values x_t timestep"),
        (lambda: modeling_pi05.PI05Pytorch.sample_noise, "self shape device"),
        (lambda: vla_utils.prepare_attention_masks_4d, "att_2d_masks"),
    ],
)
def test_leading_parameters(function: Callable[[], Any], names: str) -> None:
    with relied_on_by(PI0):
        parameters = list(inspect.signature(inspect.unwrap(function())).parameters)
        assert parameters[: len(names.split())] == names.split()


def test_a_prefix_need_not_be_a_cache() -> None:
    with relied_on_by(PI0):
        pairs = [(torch.ones(1, 1, 2, 8), torch.zeros(1, 1, 2, 8), None)] * 3
        copied = vla_utils.clone_past_key_values(pairs)
        assert [layer.keys.shape for layer in copied.layers] == [(1, 1, 2, 8)] * 3


def test_nothing_reads_the_experts_output_layer(policy: Any) -> None:
    with relied_on_by(PI0):
        policy(pi0_toys.make_batch())[0].backward()
        assert policy.model.paligemma_with_expert.gemma_expert.lm_head.weight.grad is None


def test_some_weights_stay_float32(kind: Any, toy_vlm: Path) -> None:
    """Watch that `teacher_dtype` casts what lerobot's own `dtype` casts."""
    with relied_on_by(PI0), pi0_toys.toy_sizes(toy_vlm, kind.policy.name):
        made = kind.policy(kind.config(**pi0_toys.settings(dtype="bfloat16")))
        both = made.model.paligemma_with_expert
        parts = (both.paligemma.model.language_model, both.gemma_expert)
        cast = {id(weight) for part in parts for weight in part.parameters() if weight.dtype == torch.bfloat16}
        assert cast == {id(weight) for weight in known_flows.flow_of(made.config).transformer(made.model, True)}


def test_lerobot_goes_on_with_random_weights(kind: Any, policy: Any, tmp_path: Path) -> None:
    """Watch the reason for `load_pi0_weights`, which can go once lerobot raises an error."""
    policy.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.action_in_proj.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with relied_on_by(PI0_MODELING):
        loaded = kind.policy.from_pretrained(tmp_path, strict=True)
        assert not torch.equal(loaded.model.action_in_proj.bias, policy.model.action_in_proj.bias)


def test_steps_of_the_processors(policy: Any) -> None:
    others = {
        "pi0": {"smolvla_new_line_processor", "pi05_prepare_state_tokenizer_processor_step"},
        "pi05": {"smolvla_new_line_processor", "pi0_new_line_processor"},
    }
    with relied_on_by(PROCESSORS):
        made = policies.make_pre_post_processors(policy.config)
        steps = {step["registry_name"] for pipeline in made for step in pipeline.get_config()["steps"]}
        assert steps == set(processors.STEPS) - others[policy.name]
