"""Settings of Accelerate: how processes share a run, the same in a simulation and in the file for launches."""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DeepSpeedPlugin

# The default first. FSDP2 gathers each block's weights for forward and for backward, or once for both ("no-reshard").
DDP, FSDP2, FSDP2_NO_RESHARD, ZERO2, ZERO3 = "ddp", "fsdp2", "fsdp2-no-reshard", "zero2", "zero3"
DEVICE, HOST, NVME = "device", "host", "nvme"
_ZERO_STAGES = {ZERO2: 2, ZERO3: 3}
# DeepSpeed's words.
_PLACES = {DEVICE: "none", HOST: "cpu", NVME: "nvme"}
# For DeepSpeed's files, until a folder of the machine's is named.
NVME_FOLDER = "/local_nvme"
OPTIMIZERS_OF_BITSANDBYTES = ("adamw-8bit-bnb", "paged-adamw-8bit", "paged-adamw-32bit")
_OF_TORCH = ("adamw", "adamw-foreach", "sgd")
# Numbers in `buffer_size` of DeepSpeed's `offload_param`, by default.
_WEIGHT_BUFFER = 100_000_000
_ADAMW = ("adamw", "adamw-foreach")
_SHARDED_BITS = ("nf4", "nf4-double")


@dataclass(frozen=True)
class Sharing:
    """The way in which processes share a run, and the places of the parts that no kernel reads."""

    engine: str = DDP
    num_gpus: int = 1
    # Place of the optimizer's state, and of the float32 copies that it updates: the device, the host, or an NVMe disk.
    # FSDP2 moves the weights too (`CPUOffloadPolicy`); DeepSpeed runs its own Adam on the host.
    optimizer_on: str = DEVICE
    weights_on: str = DEVICE  # place of the trained weights between their uses
    largest_weight: int = 0  # its numbers, where weights are on a disk: DeepSpeed reads each into one of its buffers

    def __post_init__(self) -> None:
        if self.optimizer_on == NVME and self.engine != ZERO3:
            raise ValueError(f"optimizer_on='nvme' with engine={self.engine!r}: ZeRO-3 alone can; use engine='zero3'")
        if self.optimizer_on == HOST and self.engine == DDP:
            raise ValueError(
                f"optimizer_on='host' with engine={DDP!r}: the state has a home of its own there; give "
                f"optimizer_home='host', or engine={FSDP2!r}, {ZERO2!r} or {ZERO3!r}"
            )
        if self.weights_on != DEVICE and self.engine != ZERO3 and not self.offloads_by_fsdp:
            raise ValueError(
                f"weights_on={self.weights_on!r} with engine={self.engine!r}: trained weights leave the device with "
                f"engine={ZERO3!r}, or with {FSDP2!r} and optimizer_on='host'"
            )
        if self.weights_on == NVME and self.offloads_by_fsdp:
            raise ValueError(f"weights_on='nvme' with engine={self.engine!r}: FSDP2 keeps them on the host; use 'host'")
        if self.weights_on != DEVICE and self.optimizer_on == DEVICE:
            raise ValueError(
                f"weights_on={self.weights_on!r} with optimizer_on='device': DeepSpeed moves weights together with the "
                "optimizer; give optimizer_on, too"
            )

    @property
    def is_zero(self) -> bool:
        """Return whether the engine is DeepSpeed's, which casts, scales and clips by itself."""
        return self.engine in _ZERO_STAGES

    @property
    def offloads_by_fsdp(self) -> bool:
        """Gradients are reduced in each pass then: FSDP2 else keeps them whole on the device in between."""
        return self.engine in (FSDP2, FSDP2_NO_RESHARD) and self.optimizer_on == HOST

    @property
    def has_group(self) -> bool:
        return self.num_gpus > 1 or self.engine != DDP

    def __str__(self) -> str:
        parts = []
        if self.num_gpus > 1:
            parts.append(f"on each of {self.num_gpus} GPUs with {self.engine}")
        elif self.engine != DDP:
            parts.append(f"with {self.engine}")
        if self.optimizer_on != DEVICE:
            weights = " and weights" if self.offloads_by_fsdp or self.weights_on == self.optimizer_on else ""
            parts.append(f"optimizer{weights} on the {_NAMES[self.optimizer_on]}")
        if self.weights_on not in (DEVICE, self.optimizer_on):
            parts.append(f"weights on the {_NAMES[self.weights_on]}")
        return ", ".join(parts)


_NAMES = {HOST: "host", NVME: "NVMe disk"}


def check_options(options: Any) -> None:
    """Refuse `ModelOptions` that do not go together with an engine, or are not simulated with it."""
    sharing, optimizer, quantize = options.sharing, options.optimizer, options.quantize
    engine, num_gpus = sharing.engine, sharing.num_gpus
    if options.effective_batch % num_gpus:
        raise ValueError(
            f"effective_batch={options.effective_batch} cannot be divided by num_gpus={num_gpus}; use a multiple of it"
        )
    both = f"optimizer={optimizer!r} with engine={engine!r}"
    if sharing.is_zero and optimizer not in _OF_TORCH:
        raise ValueError(f"{both} is not simulated; use one of {', '.join(_OF_TORCH)}")
    if engine != DDP and optimizer in OPTIMIZERS_OF_BITSANDBYTES:
        raise ValueError(f"{both} is not simulated; use another optimizer")
    if engine != DDP and optimizer == "adafactor":
        raise ValueError(f"{both}: torch's Adafactor cannot update sharded weights; use another optimizer")
    if engine != DDP and quantize not in ("none", *_SHARDED_BITS):
        raise ValueError(
            f"quantize={quantize!r} with engine={engine!r} is not simulated: of weights in few bits the engines divide "
            f"bitsandbytes' 4 bits alone; use {' or '.join(_SHARDED_BITS)}, or engine={DDP!r}"
        )
    if sharing.optimizer_on != DEVICE and optimizer not in _ADAMW:
        raise ValueError(
            f"optimizer={optimizer!r} with optimizer_on={sharing.optimizer_on!r}: the engines that keep its state "
            "there have AdamW alone; use 'adamw'"
        )
    if options.optimizer_home == "off":
        return
    if engine != DDP:
        raise ValueError(
            f"optimizer_home={options.optimizer_home!r} with engine={engine!r}: the engine shares the state out, and "
            f"may keep it elsewhere; give optimizer_on='host' instead, or engine={DDP!r}"
        )
    if optimizer in OPTIMIZERS_OF_BITSANDBYTES:
        raise ValueError(
            f"optimizer={optimizer!r} with optimizer_home={options.optimizer_home!r} is not simulated; use another "
            "optimizer"
        )


def shards_weights(engine: str) -> bool:
    return engine in (FSDP2, FSDP2_NO_RESHARD, ZERO3)


def check_zero(engine: str, dtype: str, precision: str) -> None:
    """Refuse models that DeepSpeed cannot train; import it before processes are forked."""
    if engine not in _ZERO_STAGES:
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


def sharded_options(sharing: Sharing) -> dict[str, Any]:
    """Return the arguments of `FullyShardedDataParallelPlugin`."""
    return {
        "fsdp_version": 2,
        "reshard_after_forward": sharing.engine == FSDP2,
        "auto_wrap_policy": "transformer_based_wrap",
        "cpu_ram_efficient_loading": False,
        "cpu_offload": sharing.offloads_by_fsdp,
    }


def _zero_options(sharing: Sharing, num_micro_batches: int, max_grad_norm: float | None) -> dict[str, Any]:
    """Return fields of `DeepSpeedPlugin` and of the file for launches. Sizes of buckets are DeepSpeed's."""
    is_sharded = sharing.engine == ZERO3
    places = {"optimizer": sharing.optimizer_on, "param": sharing.weights_on}
    return {
        "zero_stage": _ZERO_STAGES[sharing.engine],
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": max_grad_norm or 0.0,
        **{f"offload_{what}_device": _PLACES[place] for what, place in places.items()},
        **{f"offload_{what}_nvme_path": NVME_FOLDER for what, place in places.items() if place == NVME},
        "zero3_init_flag": is_sharded,
        "zero3_save_16bit_model": is_sharded,
    }


def zero_plugin(sharing: Sharing, num_micro_batches: int, max_grad_norm: float | None) -> Any:
    """Return DeepSpeed's settings; scripts and Trainer fill in what is "auto".

    DeepSpeed has five buffers for weights on a disk, each here for a rank's share of the largest weight. A buffer keeps
    its weight until that leaves the device.
    """
    plugin = DeepSpeedPlugin(**_zero_options(sharing, num_micro_batches, max_grad_norm))
    if sharing.weights_on == NVME:
        zero, share = plugin.deepspeed_config["zero_optimization"], math.ceil(sharing.largest_weight / sharing.num_gpus)
        zero["offload_param"]["buffer_size"] = max(_WEIGHT_BUFFER, share)
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    return plugin


def write_accelerate_config(
    path: Path,
    mixed_precision: str,
    sharing: Sharing | None = None,
    num_micro_batches: int = 1,
    max_grad_norm: float | None = None,
) -> Path:
    """Write the file for `accelerate launch --config_file`: one machine, and a process on each of its GPUs.

    Only DeepSpeed is told there about accumulation and clipping. Where it uses a disk, it reads a file of its own,
    `deepspeed.json` beside the other: `accelerate launch` does not pass the disk's folder on.
    """
    shared = sharing or Sharing()
    processes = _processes(shared, num_micro_batches, max_grad_norm)
    precision: str | None = mixed_precision
    if NVME in (shared.optimizer_on, shared.weights_on):
        described = path.with_name("deepspeed.json")
        fields = zero_plugin(shared, num_micro_batches, max_grad_norm).deepspeed_config
        del fields["steps_per_print"]  # infinite, which JSON cannot say
        fields |= {"gradient_clipping": max_grad_norm or 0.0}
        fields |= {name: {"enabled": mixed_precision == name} for name in ("fp16", "bf16")}
        described.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        # Accelerate refuses files that say in both places what DeepSpeed shall do.
        processes["deepspeed_config"] = {"deepspeed_config_file": str(described), "zero3_init_flag": True}
        precision = None
    ClusterConfig(
        compute_environment="LOCAL_MACHINE", mixed_precision=precision, use_cpu=False, debug=False, **processes
    ).to_yaml_file(path)
    return path


def _processes(sharing: Sharing, num_micro_batches: int, max_grad_norm: float | None) -> dict[str, Any]:
    if not sharing.has_group:
        return {"distributed_type": "NO", "num_processes": 1}
    count = {"num_processes": sharing.num_gpus}
    if sharing.engine == DDP:
        return {"distributed_type": "MULTI_GPU", **count}
    if sharing.is_zero:
        zero = _zero_options(sharing, num_micro_batches, max_grad_norm)
        return {"distributed_type": "DEEPSPEED", **count, "deepspeed_config": zero}
    sharding = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": sharing.engine == FSDP2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_offload_params": sharing.offloads_by_fsdp,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    return {"distributed_type": "FSDP", **count, "fsdp_config": sharding}
