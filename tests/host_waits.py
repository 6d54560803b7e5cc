"""Regions in which the host must not wait for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def host_never_waits() -> Iterator[None]:
    """Make torch raise an error at every call that it knows to wait for a CUDA device."""
    try:
        _set_mode("error")
        yield
    finally:
        _set_mode("default")


def _set_mode(mode: str) -> None:
    with warnings.catch_warnings():
        # torch warns after it has set the mode; an error would leave it set for all later tests.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode(mode)
