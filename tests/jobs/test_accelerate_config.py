"""Files for `accelerate launch`, and the same settings in a simulation."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_ranks import unread_labels
from late_imports import LateModule
from simulated import simulated

from hf_memopt.estimate.simulation.child_process import run_isolated
from hf_memopt.estimate.simulation.ranks.first_rank import first_of
from hf_memopt.jobs.accelerate_config import (
    DDP,
    FSDP2,
    FSDP2_NO_RESHARD,
    ZERO2,
    ZERO3,
    accelerator_for,
    check_ranks,
    check_step,
    check_zero,
    write_accelerate_config,
)

launch = LateModule("accelerate.commands.launch")
launch_utils = LateModule("accelerate.utils.launch")


def launched(path: Path) -> tuple[Any, dict[str, str]]:
    """Return the arguments of `accelerate launch` with a file, and its processes' environment."""
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
        with first_of(4, device, unread_labels()):
            accelerator = accelerator_for("bf16", 2, engine, 1, 1.0)
            return str(accelerator.distributed_type), accelerator.num_processes, sharding(accelerator.state.fsdp_plugin)

    arguments, environment = launched(write_accelerate_config(tmp_path / "accelerate.yaml", "bf16", 4, engine))
    assert (arguments.num_processes, arguments.use_fsdp, environment["ACCELERATE_USE_FSDP"]) == (4, True, "true")
    with patch.dict(os.environ, environment):
        read = sharding(FullyShardedDataParallelPlugin())
    assert simulated(simulated_sharding) == ("DistributedType.FSDP", 4, read)
    wrapped = "transformer_auto_wrap_policy", "OffloadPolicy"
    assert read == [2, engine == FSDP2, False, False, *wrapped]


with_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@with_deepspeed
@pytest.mark.parametrize(("engine", "max_grad_norm"), [(ZERO2, None), (ZERO3, 0.5)])
def test_accelerate_configures_deepspeed_as_in_the_simulation(
    engine: str, max_grad_norm: float | None, tmp_path: Path
) -> None:
    def simulated_config(device: torch.device) -> tuple[Any, ...]:
        with first_of(4, device, unread_labels()):
            accelerator = accelerator_for("bf16", 2, engine, 3, max_grad_norm)
            plugin = accelerator.state.deepspeed_plugin
            return str(accelerator.distributed_type), accelerator.num_processes, plugin.deepspeed_config

    def launched_config() -> tuple[int, Any]:
        from accelerate.utils import DeepSpeedPlugin

        path = write_accelerate_config(tmp_path / "accelerate.yaml", "bf16", 4, engine, 2, max_grad_norm)
        arguments = launch.launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
        arguments, _, _ = launch._validate_launch_command(arguments)
        arguments.deepspeed_fields_from_accelerate_config = ""  # its command names them, for messages
        _, environment = launch_utils.prepare_deepspeed_cmd_env(arguments)
        with patch.dict(os.environ, environment, DS_ACCELERATOR="cpu"):
            plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
        return arguments.num_processes, plugin.deepspeed_config | {"train_micro_batch_size_per_gpu": 3}

    num_processes, config = run_isolated(launched_config)
    assert simulated(simulated_config) == ("DistributedType.DEEPSPEED", num_processes, config)
    assert config["zero_optimization"]["stage"] == {ZERO2: 2, ZERO3: 3}[engine]
    assert config["gradient_accumulation_steps"] == 2
    assert config.get("gradient_clipping") == max_grad_norm


@with_deepspeed
def test_deepspeed_is_imported_and_finds_its_device_later() -> None:
    lines = (
        "import sys",
        "from hf_memopt.jobs.accelerate_config import check_zero",
        "check_zero('zero3', 'float32', 'no')",
        "assert sys.modules['deepspeed'].accelerator.real_accelerator.ds_accelerator is None",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_deepspeed_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("deepspeed", "deepspeed.accelerator"):
        monkeypatch.setitem(sys.modules, module, None)
    check_zero(FSDP2, "bfloat16", "no")
    with pytest.raises(ValueError, match=r"^engine='zero2' needs DeepSpeed: pip install deepspeed$"):
        check_zero(ZERO2, "float32", "no")


def test_deepspeed_casts_by_itself() -> None:
    with pytest.raises(ValueError, match=r"dtype='bfloat16' with engine='zero3' and precision='no': .*='bf16'$"):
        check_zero(ZERO3, "bfloat16", "no")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gpus": 1}, "engine='fsdp2' shards over several GPUs; give num_gpus of at least 2"),
        ({"effective_batch": 6}, "effective_batch=6 cannot be divided by num_gpus=4; use a multiple of it"),
        ({"optimizer": "adafactor"}, "optimizer='adafactor' with engine='fsdp2': .* use another optimizer"),
        (
            {"engine": "zero3", "optimizer": "adamw-8bit"},
            "optimizer='adamw-8bit' with engine='zero3' is not simulated; use one of adamw, adamw-foreach, sgd",
        ),
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
