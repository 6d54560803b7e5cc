from typing import Any

import pytest
from estimate_runs import mlp_setup, step
from transformers_toys import FolderOf, estimate, write_config

from hf_memopt.planning import MemoryEstimate, estimate_peak_memory


@pytest.fixture(scope="session")
def estimated() -> MemoryEstimate:
    return estimate_peak_memory(mlp_setup, step)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    def write(model_type: str, **changes: Any) -> str:
        return write_config(tmp_path_factory.mktemp(model_type), model_type, **changes)

    return write


@pytest.fixture(scope="session")
def qwen3(folder_of: FolderOf) -> str:
    return folder_of("qwen3")


@pytest.fixture(scope="session")
def plain(qwen3: str) -> MemoryEstimate:
    return estimate(qwen3, precision="bf16")
