import gc
from collections.abc import Iterator

import pytest
from leaky_steps import toy, toy_step


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """What is older than this module is hidden, so that looking at all storages is fast."""
    toy_step(*toy())  # torch imports a lot when an optimizer runs for the first time
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
