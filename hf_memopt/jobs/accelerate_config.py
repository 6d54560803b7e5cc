"""Settings of Accelerate: how processes share a run, the same in a simulation and in the file for launches."""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from accelerate import Accelerator
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, GradientAccumulationPlugin

# The default first. FSDP2 gathers each block's weights for forward and for backward, or once for both ("no-reshard").
DDP, FSDP2, FSDP2_NO_RESHARD, ZERO2, ZERO3 = "ddp", "fsdp2", "fsdp2-no-reshard", "zero2", "zero3"
_ZERO_STAGES = {ZERO2: 2, ZERO3: 3}
_OF_BITSANDBYTES = ("adamw-8bit-bnb", "paged-adamw-8bit", "paged-adamw-32bit")
_OF_TORCH = ("adamw", "adamw-foreach", "sgd")
NOT_COUNTED = "Memory that NCCL takes for itself and time for communication are not in it."


def check_ranks(num_gpus: int, engine: str, effective_batch: int, optimizer: str, quantize: str) -> None:
    if engine != DDP and num_gpus == 1:
        raise ValueError(f"engine={engine!r} shards over several GPUs; give num_gpus of at least 2")
    if effective_batch % num_gpus:
        raise ValueError(
            f"effective_batch={effective_batch} cannot be divided by num_gpus={num_gpus}; use a multiple of it"
        )
    if is_zero(engine) and optimizer not in _OF_TORCH:
        raise ValueError(
            f"optimizer={optimizer!r} with engine={engine!r} is not simulated; use one of {', '.join(_OF_TORCH)}"
        )
    if engine != DDP and optimizer in _OF_BITSANDBYTES:
        raise ValueError(f"optimizer={optimizer!r} with engine={engine!r} is not simulated; use another optimizer")
    if engine != DDP and optimizer == "adafactor":
        raise ValueError(
            f"optimizer={optimizer!r} with engine={engine!r}: torch's Adafactor cannot update sharded weights; use "
            "another optimizer"
        )
    if engine != DDP and quantize != "none":
        raise ValueError(
            f"quantize={quantize!r} with engine={engine!r} is not simulated: Accelerate leaves such weights whole on "
            f"each GPU; use engine={DDP!r}"
        )


def is_zero(engine: str) -> bool:
    """Return whether an engine is DeepSpeed's, which casts, scales and clips by itself."""
    return engine in _ZERO_STAGES


def check_zero(engine: str, dtype: str, precision: str) -> None:
    """Refuse models that DeepSpeed cannot train; import it before processes are forked."""
    if not is_zero(engine):
        return
    if precision == "no" and dtype != "float32":
        raise ValueError(
            f"dtype={dtype!r} with engine={engine!r} and precision='no': DeepSpeed trains weights of 16 bits beside a "
            "copy in float32; use precision='bf16'"
        )
    is_new = "deepspeed" not in sys.modules
    try:
        # Else it would look for a GPU, and keep its finding.
        with patch.dict(os.environ, DS_ACCELERATOR="cpu"):
            from deepspeed.accelerator import real_accelerator
    except ModuleNotFoundError as error:
        raise ValueError(f"engine={engine!r} needs DeepSpeed: pip install deepspeed") from error
    if is_new:
        real_accelerator.ds_accelerator = None


def check_step(num_gpus: int, engine: str, effective_batch: int, micro_batch: int, offload: str) -> int:
    share = effective_batch // num_gpus
    if micro_batch < 1 or share % micro_batch:
        ranks = f" // num_gpus={num_gpus}" if num_gpus > 1 else ""
        raise ValueError(f"micro_batch={micro_batch} must be a divisor of effective_batch={effective_batch}{ranks}")
    if engine != DDP and offload != "off":
        raise ValueError(f"offload={offload!r} with engine={engine!r} is not simulated; use offload='off'")
    return share // micro_batch


def accelerator_for(
    precision: str, num_micro_batches: int, engine: str, micro_batch: int, max_grad_norm: float | None
) -> Accelerator:
    """Return the `Accelerator` that a script has when it is launched with the file of `write_accelerate_config`.

    DeepSpeed wants to be told the micro-batch, and clips by itself.
    """
    sharding = zero = None
    if is_zero(engine):
        zero = DeepSpeedPlugin(**_zero_options(engine, num_micro_batches, max_grad_norm))
        zero.deepspeed_config["train_micro_batch_size_per_gpu"] = micro_batch
    elif engine != DDP:
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=engine == FSDP2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
    windows = GradientAccumulationPlugin(num_steps=num_micro_batches, sync_with_dataloader=False)
    return Accelerator(
        mixed_precision=precision, gradient_accumulation_plugin=windows, fsdp_plugin=sharding, deepspeed_plugin=zero
    )


def _zero_options(engine: str, num_micro_batches: int, max_grad_norm: float | None) -> dict[str, Any]:
    """Return fields of `DeepSpeedPlugin` and of the file for launches. Sizes of buckets are DeepSpeed's."""
    is_sharded = engine == ZERO3
    return {
        "zero_stage": _ZERO_STAGES[engine],
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": max_grad_norm or 0.0,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": is_sharded,
        "zero3_save_16bit_model": is_sharded,
    }


def write_accelerate_config(
    path: Path,
    mixed_precision: str,
    num_gpus: int = 1,
    engine: str = DDP,
    num_micro_batches: int = 1,
    max_grad_norm: float | None = None,
) -> Path:
    """Write the file for `accelerate launch --config_file`: one machine, and a process on each of its GPUs.

    Only DeepSpeed is told there about accumulation and clipping.
    """
    ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        mixed_precision=mixed_precision,
        use_cpu=False,
        debug=False,
        **_processes(num_gpus, engine, num_micro_batches, max_grad_norm),
    ).to_yaml_file(path)
    return path


def _processes(num_gpus: int, engine: str, num_micro_batches: int, max_grad_norm: float | None) -> dict[str, Any]:
    if num_gpus == 1:
        return {"distributed_type": "NO", "num_processes": 1}
    if engine == DDP:
        return {"distributed_type": "MULTI_GPU", "num_processes": num_gpus}
    if is_zero(engine):
        zero = _zero_options(engine, num_micro_batches, max_grad_norm)
        return {"distributed_type": "DEEPSPEED", "num_processes": num_gpus, "deepspeed_config": zero}
    sharding = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": engine == FSDP2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    return {"distributed_type": "FSDP", "num_processes": num_gpus, "fsdp_config": sharding}
