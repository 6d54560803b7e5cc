"""π0 and π0.5 at toy size: lerobot's own code with small numbers, for which its configuration has no fields."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import reflow_students
import torch
from lerobot.policies.pi0 import modeling_pi0, processor_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05 import modeling_pi05, processor_pi05
from reflow_students import CHUNK, moved, robot
from torch import Tensor
from transformers import SiglipVisionConfig

from hf_memopt.lerobot.pi0.configuration_pi0_reflow import PI0ReflowConfig
from hf_memopt.lerobot.pi0.modeling_pi0_reflow import PI0ReflowPolicy
from hf_memopt.recipes.reflow.smolvla_toy import IMAGE_SIZE

VOCABULARY = 320
# Rounding: the joint forward multiplies tokens of VLM and expert in other groups than the shared path.
TOLERANCE = 1e-5
_WIDTHS = {"gemma_2b": 48, "gemma_300m": 32}
_SIZES: dict[str, Any] = {
    "chunk_size": CHUNK,
    "n_action_steps": CHUNK,
    "image_resolution": (IMAGE_SIZE, IMAGE_SIZE),
    "device": "cpu",
    "push_to_hub": False,
}


@contextmanager
def toy_sizes(
    tokenizer: Path, modeling: ModuleType = modeling_pi0, processing: ModuleType = processor_pi0
) -> Iterator[None]:
    """Let lerobot build a toy π0 of its own classes, with a tokenizer on the disk."""
    vlm, expert = modeling.PaliGemmaForConditionalGenerationWithPiGemma, modeling.PiGemmaForCausalLM

    def gemma(variant: str) -> Any:
        # lerobot's layers have eight heads, whatever the configuration says.
        width = _WIDTHS[variant]
        return modeling.GemmaConfig(width, depth=3, mlp_dim=2 * width, num_heads=8, num_kv_heads=1, head_dim=8)

    def toy_vlm(config: Any) -> Any:
        config.text_config.vocab_size = VOCABULARY
        config.image_token_id = VOCABULARY - 1
        config.vision_config = SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            patch_size=8,
            image_size=config.vision_config.image_size,
            projection_dim=config.text_config.hidden_size,
            vision_use_head=False,
        )
        return vlm(config)

    def toy_expert(config: Any) -> Any:
        config.vocab_size = VOCABULARY
        return expert(config)

    step = processing.TokenizerProcessorStep

    def tokenizer_step(tokenizer_name: str, **settings: Any) -> Any:
        assert tokenizer_name == "google/paligemma-3b-pt-224"
        return step(tokenizer_name=str(tokenizer), **settings)

    with (
        patch.object(modeling, "get_gemma_config", gemma),
        patch.object(modeling, "PaliGemmaForConditionalGenerationWithPiGemma", toy_vlm),
        patch.object(modeling, "PiGemmaForCausalLM", toy_expert),
        patch.object(processing, "TokenizerProcessorStep", tokenizer_step),
    ):
        yield


def pi05_toy_sizes(tokenizer: Path) -> AbstractContextManager[None]:
    return toy_sizes(tokenizer, modeling_pi05, processor_pi05)


def teacher_flags() -> list[str]:
    """Return flags with which stock lerobot trains a π0 on the toy task."""
    flags = {**_SIZES, "image_resolution": f"[{IMAGE_SIZE},{IMAGE_SIZE}]", "max_state_dim": 4, "max_action_dim": 4}
    return ["--policy.type=pi0", *(f"--policy.{name}={value}" for name, value in flags.items())]


def settings(**changes: Any) -> dict[str, Any]:
    return {**_SIZES, "train_expert_only": True, **robot(), **changes}


def write_teacher(folder: Path, **changes: Any) -> Path:
    """Save random weights."""
    torch.manual_seed(0)
    modeling_pi0.PI0Policy(PI0Config(**settings(**changes))).save_pretrained(folder)
    return folder


def make_student(teacher: Path, **flags: Any) -> PI0ReflowPolicy:
    """Return a student whose trained weights have moved away from its teacher's."""
    fields = {"use_reflow": True, "teacher_model_path": str(teacher), "teacher_offload": "swap", **flags}
    student = PI0ReflowPolicy.from_pretrained(teacher, config=PI0ReflowConfig(**settings(**fields)))
    return moved(student)


def make_batch() -> dict[str, Tensor]:
    """Return a batch of padded instructions, with all cameras."""
    return {name: value for name, value in reflow_students.make_batch().items() if "padding_mask" not in name}
