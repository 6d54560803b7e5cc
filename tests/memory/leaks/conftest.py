import gc
from collections.abc import Iterator

import pytest
from leaky_steps import toy, toy_step


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Hide older objects from the collector: a search of all storages becomes fast."""
    toy_step(*toy())  # torch imports many modules at the first optimizer step
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
