"""huggingface_hub in a simulation: the switches of its module `constants`, which it reads at each request."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from huggingface_hub import constants


def offline() -> AbstractContextManager[Any]:
    """Make huggingface_hub and transformers read their cache alone."""
    return patch.object(constants, "HF_HUB_OFFLINE", True)


def without_telemetry() -> AbstractContextManager[Any]:
    """Send no telemetry, as TRL's trainers do when they are made."""
    return patch.object(constants, "HF_HUB_DISABLE_TELEMETRY", True)
