"""A count of a process's live objects without those of earlier tests."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

from hf_memopt.memory import attribution
from hf_memopt.memory.leaks.live_storages import Held, live_storages


def hide_what_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports see only later storages and optimizers."""
    gc.collect()
    others = set(live_storages())
    other_optimizers = {id(optimizer) for optimizer in attribution.live_optimizers()}
    all_optimizers: Callable[[], list[Any]] = attribution.live_optimizers

    def new_storages() -> dict[int, list[Held]]:
        return {address: held for address, held in live_storages().items() if address not in others}

    monkeypatch.setattr(attribution, "live_storages", new_storages)
    monkeypatch.setattr(
        attribution, "live_optimizers", lambda: [each for each in all_optimizers() if id(each) not in other_optimizers]
    )
