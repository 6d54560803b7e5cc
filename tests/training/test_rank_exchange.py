"""Tests of the engines that exact steps know. tests/distributed/test_sharded_training.py runs two processes."""

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from hf_memopt.training.rank_exchange import check_distributed_type


@pytest.fixture
def accelerator() -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("FSDP", "use fsdp_version=2"),
        ("MEGATRON_LM", "use accelerator.accumulate"),
        ("XLA", "use accelerator.accumulate"),
    ],
)
def test_other_engines_are_refused(accelerator: Accelerator, kind: str, remedy: str) -> None:
    accelerator.state.distributed_type = DistributedType[kind]
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(ValueError, match=f"distributed_type=.*{kind}.*{remedy}"):
        check_distributed_type(accelerator)
