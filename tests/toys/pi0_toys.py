"""π0 and π0.5 at toy size: lerobot's own code with small numbers, for which its configuration has no fields."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import reflow_students
import torch
from lerobot.policies.pi0 import modeling_pi0, processor_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05 import modeling_pi05, processor_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from reflow_students import CHUNK, moved, robot
from torch import Tensor
from transformers import SiglipVisionConfig

from hf_memopt.lerobot.files.policy_files import load_config
from hf_memopt.lerobot.pi0.configuration_pi0_reflow import PI0ReflowConfig, PI05ReflowConfig
from hf_memopt.lerobot.pi0.modeling_pi0_reflow import PI0ReflowPolicy, PI05ReflowPolicy
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


@dataclass(frozen=True)
class Kind:
    """Classes of lerobot's and of the student's, and the modules in which lerobot's are."""

    config: Any
    policy: Any
    student_config: Any
    student: Any
    modeling: ModuleType
    processing: ModuleType


KINDS = {
    "pi0": Kind(PI0Config, modeling_pi0.PI0Policy, PI0ReflowConfig, PI0ReflowPolicy, modeling_pi0, processor_pi0),
    "pi05": Kind(
        PI05Config, modeling_pi05.PI05Policy, PI05ReflowConfig, PI05ReflowPolicy, modeling_pi05, processor_pi05
    ),
}


@contextmanager
def toy_sizes(tokenizer: Path, kind: str) -> Iterator[None]:
    """Let lerobot build a toy policy of its own classes, with a tokenizer on the disk."""
    modeling, processing = KINDS[kind].modeling, KINDS[kind].processing
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


def teacher_flags(kind: str) -> list[str]:
    """Return flags with which stock lerobot trains a policy on the toy task."""
    flags = {**_SIZES, "image_resolution": f"[{IMAGE_SIZE},{IMAGE_SIZE}]", "max_state_dim": 4, "max_action_dim": 4}
    return [f"--policy.type={kind}", *(f"--policy.{name}={value}" for name, value in flags.items())]


def settings(**changes: Any) -> dict[str, Any]:
    return {**_SIZES, "train_expert_only": True, **robot(), **changes}


def write_teacher(folder: Path, kind: str, **changes: Any) -> Path:
    """Save random weights, moved because lerobot's first ones hide the time from π0.5's expert."""
    torch.manual_seed(0)
    made = KINDS[kind]
    moved(made.policy(made.config(**settings(**changes)))).save_pretrained(folder)
    return folder


def make_student(teacher: Path, **flags: Any) -> Any:
    """Return a student whose trained weights have moved away from its teacher's."""
    made = KINDS[load_config(teacher).type]
    fields = {"use_reflow": True, "teacher_model_path": str(teacher), "teacher_offload": "swap", **flags}
    return moved(made.student.from_pretrained(teacher, config=made.student_config(**settings(**fields))))


def make_batch() -> dict[str, Tensor]:
    """Return a batch of padded instructions, with all cameras."""
    return {name: value for name, value in reflow_students.make_batch().items() if "padding_mask" not in name}
