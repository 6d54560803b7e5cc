"""Tests of the region without host waits: torch's warning neither leaves the debug mode set nor fails a test."""

import warnings

import pytest
import torch
from host_waits import host_never_waits


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sync debug modes set so far, the last one in force. Each setting gives a warning, as on CUDA."""
    given = ["default"]

    def set_mode(mode: str) -> None:
        given.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return given


def test_the_mode_holds_inside_and_is_put_back(modes: list[str]) -> None:
    with host_never_waits():
        assert modes[-1] == "error"
    assert modes[-1] == "default"


def test_the_mode_is_put_back_after_an_error(modes: list[str]) -> None:
    with pytest.raises(KeyError), host_never_waits():
        raise KeyError
    assert modes[-1] == "default"


@pytest.mark.filterwarnings("error")  # as in the whole suite, except with newer versions of libraries
def test_other_warnings_are_errors_inside(modes: list[str]) -> None:
    with pytest.raises(UserWarning, match="something else"), host_never_waits():
        warnings.warn("something else", stacklevel=1)
    assert modes[-1] == "default"
