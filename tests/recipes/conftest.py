from collections.abc import Iterator
from pathlib import Path

import accelerators
import pytest


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    with accelerators.on_the_cpu():
        yield


@pytest.fixture
def no_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
