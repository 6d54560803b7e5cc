"""lerobot in a simulation: the VLM of a SmolVLA, of which the configuration alone is read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from lerobot.policies.smolvla import smolvlm_with_expert

from hf_memopt.planning.simulation.patched_transformers import weights_from_config

# lerobot reads the ids of two special tokens from the VLM's tokenizer; they change no memory.
_TOKENIZER = SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)


@contextmanager
def vlm_from_config(read: Callable[[str], Any]) -> Iterator[None]:
    """Build VLMs from the configurations that `read` returns: lerobot loads a model and a processor by two classes."""
    processor = SimpleNamespace(from_pretrained=lambda name: SimpleNamespace(tokenizer=_TOKENIZER))
    with (
        weights_from_config(smolvlm_with_expert.AutoModelForImageTextToText, read),
        patch.object(smolvlm_with_expert, "AutoProcessor", processor),
    ):
        yield
