import pytest
from estimate_runs import mlp_setup, step

from hf_memopt.estimate import MemoryEstimate, estimate_peak_memory


@pytest.fixture(scope="session")
def estimated() -> MemoryEstimate:
    return estimate_peak_memory(mlp_setup, step)
