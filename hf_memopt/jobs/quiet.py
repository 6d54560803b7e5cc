"""Making models and trainers without the notes of their libraries, which are for those who train."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

_LOGGERS = ("trl", "DeepSpeed")


@contextmanager
def quiet() -> Iterator[None]:
    """Show no warnings, and let DeepSpeed, which accelerate imports where it is installed, look for no GPU."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
