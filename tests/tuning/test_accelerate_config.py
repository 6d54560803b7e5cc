"""The file that `accelerate launch` reads, and the same in a simulation."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from late_imports import LateModule
from simulated import simulated

from hf_memopt.estimate.simulation.first_rank import first_of
from hf_memopt.tuning.accelerate_config import (
    DDP,
    ENGINES,
    FSDP2,
    FSDP2_NO_RESHARD,
    accelerator_for,
    check_ranks,
    check_step,
    write_accelerate_config,
)

launch = LateModule("accelerate.commands.launch")
launch_utils = LateModule("accelerate.utils.launch")


def launched(path: Path) -> tuple[Any, dict[str, str]]:
    """The arguments of `accelerate launch` with a file, and the environment that its processes get."""
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    arguments, _, _ = launch._validate_launch_command(arguments)
    return arguments, launch_utils.prepare_multi_gpu_env(arguments)


def test_accelerate_reads_one_process_and_its_precision(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = write_accelerate_config(tmp_path / "accelerate.yaml", "bf16")
    config = load_config_from_file(str(path))
    assert (config.mixed_precision, config.num_processes, config.use_cpu) == ("bf16", 1, False)
    assert str(config.distributed_type) == "DistributedType.NO"


def test_accelerate_launches_ddp(tmp_path: Path) -> None:
    arguments, environment = launched(write_accelerate_config(tmp_path / "accelerate.yaml", "no", 4, DDP))
    assert (arguments.num_processes, arguments.multi_gpu, arguments.use_fsdp) == (4, True, False)
    assert "ACCELERATE_USE_FSDP" not in environment


def sharding(plugin: Any) -> list[Any]:
    names = ("fsdp_version", "reshard_after_forward", "activation_checkpointing", "cpu_ram_efficient_loading")
    policies = plugin.auto_wrap_policy.__name__, type(plugin.cpu_offload).__name__
    return [*(getattr(plugin, name) for name in names), *policies]


@pytest.mark.parametrize("engine", [FSDP2, FSDP2_NO_RESHARD])
def test_accelerate_shards_as_in_the_simulation(engine: str, tmp_path: Path) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    def simulated_sharding(device: torch.device) -> tuple[Any, ...]:
        with first_of(4, device, id):
            accelerator = accelerator_for("bf16", 2, engine)
            return str(accelerator.distributed_type), accelerator.num_processes, sharding(accelerator.state.fsdp_plugin)

    arguments, environment = launched(write_accelerate_config(tmp_path / "accelerate.yaml", "bf16", 4, engine))
    assert (arguments.num_processes, arguments.use_fsdp, environment["ACCELERATE_USE_FSDP"]) == (4, True, "true")
    with patch.dict(os.environ, environment):
        read = sharding(FullyShardedDataParallelPlugin())
    assert simulated(simulated_sharding) == ("DistributedType.FSDP", 4, read)
    wrapped = "transformer_auto_wrap_policy", "OffloadPolicy"
    assert read == [2, engine == FSDP2, False, False, *wrapped]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "zero2"}, "engine='zero2' is DeepSpeed's, .*; engine='fsdp2-no-reshard' shards the same"),
        ({"engine": "zero3"}, "engine='zero3' is DeepSpeed's, .*; engine='fsdp2' shards the same"),
        ({"num_gpus": 1}, "engine='fsdp2' shards over several GPUs; give num_gpus of at least 2"),
        ({"effective_batch": 6}, "effective_batch=6 cannot be divided by num_gpus=4; use a multiple of it"),
        ({"optimizer": "adafactor"}, "optimizer='adafactor' with engine='fsdp2': .* use another optimizer"),
        ({"quantize": "nf4"}, "quantize='nf4' with engine='fsdp2' is not simulated: .* use engine='ddp'"),
    ],
)
def test_what_cannot_be_run_by_several_processes_is_refused(options: dict[str, Any], message: str) -> None:
    good = {"num_gpus": 4, "engine": FSDP2, "effective_batch": 8, "optimizer": "adamw", "quantize": "none"}
    check_ranks(**good)
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_ranks(**good | options)


def test_each_gpu_has_its_share_of_an_update() -> None:
    assert check_step(4, FSDP2, 24, 2, "off") == 3
    assert check_step(1, DDP, 24, 24, "all") == 1
    with pytest.raises(ValueError, match="micro_batch=4 must be a divisor of effective_batch=24 // num_gpus=4"):
        check_step(4, DDP, 24, 4, "off")
    with pytest.raises(ValueError, match="offload='all' with engine='fsdp2' is not simulated"):
        check_step(4, FSDP2, 24, 2, "all")


def test_the_default_engine_is_the_first_one() -> None:
    assert ENGINES[0] == DDP
