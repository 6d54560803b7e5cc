"""Files for `accelerate launch`, and the same settings in a simulation."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from launched_files import launched
from simulated import simulated, unread_base

from hf_memopt.planning.models.accelerate_config import (
    DDP,
    FSDP2,
    FSDP2_NO_RESHARD,
    HOST,
    NVME,
    NVME_FOLDER,
    ZERO2,
    ZERO3,
    Sharing,
    check_options,
    check_zero,
    sharded_options,
    write_accelerate_config,
    zero_plugin,
)
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.planning.simulation.ranks.first_rank import first_of

ROOT = Path(__file__).parents[3]


def test_accelerate_reads_one_process_and_its_precision(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = write_accelerate_config(tmp_path / "accelerate.yaml", "bf16")
    config = load_config_from_file(str(path))
    assert (config.mixed_precision, config.num_processes, config.use_cpu) == ("bf16", 1, False)
    assert str(config.distributed_type) == "DistributedType.NO"


def test_accelerate_launches_ddp(tmp_path: Path) -> None:
    arguments, environment = launched(write_accelerate_config(tmp_path / "accelerate.yaml", "no", Sharing(DDP, 4)))
    assert (arguments.num_processes, arguments.multi_gpu, arguments.use_fsdp) == (4, True, False)
    assert "ACCELERATE_USE_FSDP" not in environment


def sharding(plugin: Any) -> list[Any]:
    names = ("fsdp_version", "reshard_after_forward", "activation_checkpointing", "cpu_ram_efficient_loading")
    policies = plugin.auto_wrap_policy.__name__, type(plugin.cpu_offload).__name__
    return [*(getattr(plugin, name) for name in names), *policies]


OF_FSDP2 = [Sharing(FSDP2, 4), Sharing(FSDP2_NO_RESHARD, 4), Sharing(FSDP2, 4, HOST), Sharing(FSDP2, 1, HOST)]


@pytest.mark.parametrize("sharing", OF_FSDP2, ids=str)
def test_accelerate_shards_as_in_the_simulation(sharing: Sharing, tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    def simulated_sharding(device: torch.device) -> tuple[Any, ...]:
        with first_of(sharing.num_gpus, device, unread_base()):
            plugin = FullyShardedDataParallelPlugin(**sharded_options(sharing))
            accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
            return str(accelerator.distributed_type), accelerator.num_processes, sharding(accelerator.state.fsdp_plugin)

    arguments, environment = launched(write_accelerate_config(tmp_path / "accelerate.yaml", "bf16", sharing))
    assert (arguments.num_processes, arguments.use_fsdp) == (sharing.num_gpus, True)
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    with patch.dict(os.environ, environment):
        read = sharding(FullyShardedDataParallelPlugin())
    offloads = sharing.optimizer_on == HOST
    assert simulated(simulated_sharding) == ("DistributedType.FSDP", sharing.num_gpus, read)
    wrapped = "transformer_auto_wrap_policy", "CPUOffloadPolicy" if offloads else "OffloadPolicy"
    assert read == [2, sharing.engine == FSDP2, False, False, *wrapped]


with_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


OF_ZERO = [
    (Sharing(ZERO2, 4), None),
    (Sharing(ZERO3, 4), 0.5),
    (Sharing(ZERO2, 1, HOST), 0.5),
    (Sharing(ZERO3, 4, HOST, HOST), None),
    (Sharing(ZERO3, 1, NVME, HOST), 1.0),
    (Sharing(ZERO3, 2, NVME, NVME, largest_weight=500_000_001), 1.0),
]


@with_deepspeed
@pytest.mark.parametrize(("sharing", "max_grad_norm"), OF_ZERO, ids=str)
def test_accelerate_configures_deepspeed_as_in_the_simulation(
    sharing: Sharing, max_grad_norm: float | None, tmp_path: Path
) -> None:
    from accelerate import Accelerator

    def simulated_config(device: torch.device) -> tuple[Any, ...]:
        with first_of(sharing.num_gpus, device, unread_base()):
            plugin = zero_plugin(sharing, 2, max_grad_norm)
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 3
            accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
            plugin = accelerator.state.deepspeed_plugin
            return str(accelerator.distributed_type), accelerator.num_processes, plugin.deepspeed_config

    def launched_config() -> tuple[int, Any]:
        from accelerate.utils import DeepSpeedPlugin

        path = write_accelerate_config(tmp_path / "accelerate.yaml", "bf16", sharing, 2, max_grad_norm)
        arguments, environment = launched(path)
        with patch.dict(os.environ, environment, DS_ACCELERATOR="cpu"):
            plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
        return arguments.num_processes, plugin.deepspeed_config | {"train_micro_batch_size_per_gpu": 3}

    num_processes, config = run_isolated(launched_config)
    assert simulated(simulated_config) == ("DistributedType.DEEPSPEED", num_processes, config)
    assert num_processes == sharing.num_gpus
    zero, words = config["zero_optimization"], {"device": "none", HOST: "cpu", NVME: "nvme"}
    assert zero["stage"] == {ZERO2: 2, ZERO3: 3}[sharing.engine]
    assert zero["offload_optimizer"]["device"] == words[sharing.optimizer_on]
    assert zero["offload_param"]["device"] == words[sharing.weights_on]
    if sharing.optimizer_on == NVME:
        assert zero["offload_optimizer"]["nvme_path"] == NVME_FOLDER
    if sharing.weights_on == NVME:
        assert zero["offload_param"]["buffer_size"] == 250_000_001
    assert config["gradient_accumulation_steps"] == 2
    assert config.get("gradient_clipping") == max_grad_norm


# Names in recipes/configs/accelerate, and the sharing of a plan that writes the same.
SHIPPED = {
    "zero3": Sharing(ZERO3, 2),
    "zero2_offload": Sharing(ZERO2, 1, HOST),
    "zero3_offload": Sharing(ZERO3, 1, HOST, HOST),
    "zero3_nvme": Sharing(ZERO3, 1, NVME, HOST),
}


@with_deepspeed
@pytest.mark.parametrize("name", SHIPPED)
def test_files_of_the_recipes_offload_as_those_of_plans(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where their commands are run

    def offloading(path: Path) -> dict[str, Any]:
        from accelerate.utils import DeepSpeedPlugin

        _, environment = launched(path)
        with patch.dict(os.environ, environment, DS_ACCELERATOR="cpu"):
            plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision("bf16")
        zero = plugin.deepspeed_config["zero_optimization"]
        places = {
            what: {field: value for field, value in zero[what].items() if value not in (None, "none")}
            for what in ("offload_optimizer", "offload_param")
        }
        saves = zero.get("stage3_gather_16bit_weights_on_model_save")
        return places | {"stage": zero["stage"], "saves": saves, "bf16": plugin.deepspeed_config["bf16"]}

    written = write_accelerate_config(tmp_path / "accelerate.yaml", "bf16", SHIPPED[name])
    shipped = ROOT / "recipes" / "configs" / "accelerate" / f"{name}.yaml"
    assert run_isolated(lambda: offloading(shipped)) == run_isolated(lambda: offloading(written))


@pytest.mark.parametrize(
    ("name", "sharing"), [("fsdp2", Sharing(FSDP2, 2)), ("one_gpu_fsdp2_offload", Sharing(FSDP2, 1, HOST))]
)
def test_files_of_the_recipes_shard_as_those_of_plans(name: str, sharing: Sharing, tmp_path: Path) -> None:
    written = yaml.safe_load(write_accelerate_config(tmp_path / "accelerate.yaml", "bf16", sharing).read_text())
    shipped = yaml.safe_load((ROOT / "recipes" / "configs" / "accelerate" / f"{name}.yaml").read_text())
    assert shipped.items() <= written.items()


@with_deepspeed
def test_deepspeed_is_imported_and_finds_its_device_later() -> None:
    lines = (
        "import sys",
        "from hf_memopt.planning.models.accelerate_config import check_zero",
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


UNKEPT: dict[str, tuple[tuple[Any, ...], str]] = {
    "nvme": ((FSDP2, 2, NVME), "optimizer_on='nvme' with engine='fsdp2': ZeRO-3 alone can; use engine='zero3'"),
    "nvme of zero2": ((ZERO2, 2, NVME), "optimizer_on='nvme' with engine='zero2': .* use engine='zero3'"),
    "no engine": ((DDP, 1, HOST), "optimizer_on='host' with engine='ddp': .*; give optimizer_home='host', or engine="),
    "weights": ((ZERO2, 2, HOST, HOST), "weights_on='host' with engine='zero2': trained weights leave the device with"),
    "weights alone": ((FSDP2, 2, "device", HOST), "weights_on='host' with engine='fsdp2': .* and optimizer_on='host'"),
    "weights on a disk": ((FSDP2, 2, HOST, NVME), "weights_on='nvme' with engine='fsdp2': FSDP2 keeps them on"),
    "weights of zero3": ((ZERO3, 2, "device", HOST), "weights_on='host' with optimizer_on='device': .* optimizer_on"),
}


@pytest.mark.parametrize(("places", "message"), UNKEPT.values(), ids=UNKEPT)
def test_places_that_an_engine_does_not_keep_are_refused(places: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Sharing(*places)


KEPT: dict[str, tuple[Sharing, bool, bool, str]] = {
    "one": (Sharing(), False, False, ""),
    "ddp": (Sharing(DDP, 2), True, False, "on each of 2 GPUs with ddp"),
    "fsdp2": (Sharing(FSDP2, 1, HOST), True, True, "with fsdp2, optimizer and weights on the host"),
    "fsdp2 of 2": (
        Sharing(FSDP2, 2, HOST, HOST), True, True, "on each of 2 GPUs with fsdp2, optimizer and weights on the host"
    ),
    "zero2": (Sharing(ZERO2, 1, HOST), True, False, "with zero2, optimizer on the host"),
    "zero3": (Sharing(ZERO3, 1, HOST, HOST), True, False, "with zero3, optimizer and weights on the host"),
    "nvme": (
        Sharing(ZERO3, 1, NVME, HOST), True, False, "with zero3, optimizer on the NVMe disk, weights on the host"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sharing", "has_group", "offloads", "text"), KEPT.values(), ids=KEPT)
def test_a_sharing_says_who_keeps_things_where(sharing: Sharing, has_group: bool, offloads: bool, text: str) -> None:
    assert (sharing.has_group, sharing.offloads_by_fsdp, str(sharing)) == (has_group, offloads, text)


@pytest.mark.parametrize(
    ("sharing", "options", "message"),
    [
        (Sharing(FSDP2, 4), {"effective_batch": 6}, "effective_batch=6 cannot be divided by num_gpus=4; use a"),
        (Sharing(FSDP2, 4), {"optimizer": "adafactor"}, "optimizer='adafactor' with engine='fsdp2': .* another"),
        (
            Sharing(FSDP2, 4),
            {"optimizer": "paged-adamw-8bit"},
            "optimizer='paged-adamw-8bit' with engine='fsdp2' is not simulated; use another optimizer",
        ),
        (
            Sharing(ZERO3, 4),
            {"optimizer": "adamw-8bit"},
            "optimizer='adamw-8bit' with engine='zero3' is not simulated; use one of adamw, adamw-foreach, sgd",
        ),
        (
            Sharing(FSDP2, 4),
            {"quantize": "int8"},
            "quantize='int8' with engine='fsdp2' is not simulated: .* use nf4 or nf4-double, or ",
        ),
        (
            Sharing(ZERO2, 1, HOST),
            {"optimizer": "sgd"},
            "optimizer='sgd' with optimizer_on='host': .* have AdamW alone; use 'adamw'",
        ),
        *(
            (Sharing(engine), {"optimizer_home": "host"}, f"optimizer_home='host' with engine='{engine}': .*; give opt")
            for engine in (FSDP2, ZERO2, ZERO3)
        ),
        (
            Sharing(),
            {"optimizer_home": "file", "optimizer": "paged-adamw-8bit"},
            "optimizer='paged-adamw-8bit' with optimizer_home='file' is not simulated; use another optimizer",
        ),
    ],
)
def test_options_that_an_engine_cannot_run_are_refused(sharing: Sharing, options: dict[str, Any], message: str) -> None:
    good = {"effective_batch": 8, "optimizer": "adamw", "quantize": "none", "optimizer_home": "off"}
    check_options(SimpleNamespace(sharing=sharing, **good))
    with pytest.raises(ValueError, match=f"^{message}"):
        check_options(SimpleNamespace(sharing=sharing, **good | options))
