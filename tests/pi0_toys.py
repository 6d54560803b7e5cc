"""π0 at toy size: lerobot's own code with small numbers, which its configuration has no fields for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from lerobot.policies.pi0 import modeling_pi0
from transformers import SiglipVisionConfig

VOCABULARY, IMAGE_SIZE = 320, 32
_WIDTHS = {"gemma_2b": 48, "gemma_300m": 32}


def _toy_gemma(variant: str) -> modeling_pi0.GemmaConfig:
    # lerobot's layers have eight heads, whatever this says.
    width = _WIDTHS[variant]
    return modeling_pi0.GemmaConfig(width=width, depth=3, mlp_dim=2 * width, num_heads=8, num_kv_heads=1, head_dim=8)


@contextmanager
def toy_sizes() -> Iterator[None]:
    """Let lerobot build its π0 in toy size, with its own classes."""
    vlm, expert = modeling_pi0.PaliGemmaForConditionalGenerationWithPiGemma, modeling_pi0.PiGemmaForCausalLM

    def toy_vlm(config: Any) -> Any:
        width = config.text_config.hidden_size
        config.text_config.vocab_size = VOCABULARY
        config.image_token_id = VOCABULARY - 1
        config.vision_config = SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            patch_size=8,
            image_size=config.vision_config.image_size,
            projection_dim=width,
            vision_use_head=False,
        )
        return vlm(config)

    def toy_expert(config: Any) -> Any:
        config.vocab_size = VOCABULARY
        return expert(config)

    with (
        patch.object(modeling_pi0, "get_gemma_config", _toy_gemma),
        patch.object(modeling_pi0, "PaliGemmaForConditionalGenerationWithPiGemma", toy_vlm),
        patch.object(modeling_pi0, "PiGemmaForCausalLM", toy_expert),
    ):
        yield
