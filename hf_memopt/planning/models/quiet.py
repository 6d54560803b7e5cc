"""Making models and trainers: without their libraries' notes, which are for those who train; errors in one line."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from hf_memopt.planning.simulation.patched_hub import without_telemetry

_LOGGERS = ("trl", "DeepSpeed")


@contextmanager
def quiet() -> Iterator[None]:
    """Show no warnings, send no telemetry of TRL's, and let DeepSpeed, which accelerate imports, look for no GPU."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with without_telemetry(), warnings.catch_warnings(), patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def building(source: str, library: str = "transformers") -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{source}: {library} cannot build a model from this configuration ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); compare it with the one that was published"
        ) from error


@contextmanager
def refused_by(name: str) -> Iterator[None]:
    """Turn what a library raises for absurd fields of a trainer, other than ValueError, into one line."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"{name} refuses these fields ({type(error).__name__}: {' '.join(str(error).split())}); correct them"
        ) from error
