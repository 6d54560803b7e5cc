from collections.abc import Iterator

import accelerators
import pytest


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    with accelerators.on_the_cpu():
        yield
