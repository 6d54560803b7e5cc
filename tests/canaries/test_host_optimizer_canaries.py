"""Canaries of optimizers on the host: what `accelerate launch` does not pass on, and DeepSpeed's files."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from reliance import relied_on_by

CONFIG = "hf_memopt/planning/models/accelerate_config.py"


def source(package: str, path: str) -> str:
    found = find_spec(package)
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / path).read_text(encoding="utf-8")


def test_accelerate_does_not_pass_on_the_folder_of_a_disk() -> None:
    """Watch the reason for a file of DeepSpeed's own."""
    with relied_on_by(CONFIG):
        assert '"--offload_optimizer_nvme_path"' in source("accelerate", "commands/launch.py")
        assert "nvme" not in source("accelerate", "utils/launch.py").lower()


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeeds_files_need_libaio() -> None:
    """Watch the reason for naming `libaio-dev` where a plan puts the optimizer on a disk."""
    with relied_on_by("docs/optimizer_offload.md"):
        builder = source("deepspeed", "ops/op_builder/async_io.py")
        assert "self.has_function('io_submit', ('aio', ))" in builder
        assert 'dpkg=["-l", "libaio-dev", "apt"]' in builder
