"""What Accelerate is told: how processes share a run, the same in a simulation and in the file for launches."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin

# How the processes share the work, the default first. DDP keeps everything on each GPU; FSDP2 shards weights, gradients
# and the optimizer's state, and gathers each block's weights for its forward and backward (as ZeRO-3 does) or for both
# together ("no-reshard", as ZeRO-2 does).
DDP, FSDP2, FSDP2_NO_RESHARD = "ddp", "fsdp2", "fsdp2-no-reshard"
_DEEPSPEED = {"zero2": FSDP2_NO_RESHARD, "zero3": FSDP2}
ENGINES = (DDP, FSDP2, FSDP2_NO_RESHARD, *_DEEPSPEED)
_OF_BITSANDBYTES = ("adamw-8bit-bnb", "paged-adamw-8bit", "paged-adamw-32bit")
NOT_COUNTED = "Memory that NCCL takes for itself and time for communication are not in it."


def check_ranks(num_gpus: int, engine: str, effective_batch: int, optimizer: str, quantize: str) -> None:
    """Refuse what cannot be run by several processes, or is not simulated.

    Raises:
        ValueError: names the field, its value and what to use instead.
    """
    if engine in _DEEPSPEED:
        raise ValueError(
            f"engine={engine!r} is DeepSpeed's, which allocates memory by its own rules and is not simulated; "
            f"engine={_DEEPSPEED[engine]!r} shards the same"
        )
    if engine != DDP and num_gpus == 1:
        raise ValueError(f"engine={engine!r} shards over several GPUs; give num_gpus of at least 2")
    if effective_batch % num_gpus:
        raise ValueError(
            f"effective_batch={effective_batch} cannot be divided by num_gpus={num_gpus}; use a multiple of it"
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


def check_step(num_gpus: int, engine: str, effective_batch: int, micro_batch: int, offload: str) -> int:
    """Return how many forward passes each GPU has per update.

    Raises:
        ValueError: that is no whole number; or offloading beside sharded weights, which is not simulated.
    """
    share = effective_batch // num_gpus
    if micro_batch < 1 or share % micro_batch:
        ranks = f" // num_gpus={num_gpus}" if num_gpus > 1 else ""
        raise ValueError(f"micro_batch={micro_batch} must be a divisor of effective_batch={effective_batch}{ranks}")
    if engine != DDP and offload != "off":
        raise ValueError(f"offload={offload!r} with engine={engine!r} is not simulated; use offload='off'")
    return share // micro_batch


def accelerator_for(precision: str, num_micro_batches: int, engine: str) -> Accelerator:
    """Return the `Accelerator` that a script has when it is launched with what `write_accelerate_config` writes.

    Args:
        precision: of autocast: "no", "bf16" or "fp16".
        num_micro_batches: gradients are accumulated over so many.
        engine: one of `ENGINES` that is simulated.
    """
    sharding = None
    if engine != DDP:
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=engine == FSDP2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
    windows = GradientAccumulationPlugin(num_steps=num_micro_batches, sync_with_dataloader=False)
    return Accelerator(mixed_precision=precision, gradient_accumulation_plugin=windows, fsdp_plugin=sharding)


def write_accelerate_config(path: Path, mixed_precision: str, num_gpus: int = 1, engine: str = DDP) -> Path:
    """For `accelerate launch --config_file`: one machine, and a process on each of its GPUs."""
    ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        mixed_precision=mixed_precision,
        use_cpu=False,
        debug=False,
        **_processes(num_gpus, engine),
    ).to_yaml_file(path)
    return path


def _processes(num_gpus: int, engine: str) -> dict[str, Any]:
    """Return the fields of `ClusterConfig` about them."""
    if num_gpus == 1:
        return {"distributed_type": "NO", "num_processes": 1}
    if engine == DDP:
        return {"distributed_type": "MULTI_GPU", "num_processes": num_gpus}
    sharding = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": engine == FSDP2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    return {"distributed_type": "FSDP", "num_processes": num_gpus, "fsdp_config": sharding}
