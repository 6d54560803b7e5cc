"""Updates on the host in one process and in two, by the engines that files for `accelerate launch` name."""

from pathlib import Path
from typing import Any

import pytest
from deepspeed_builds import ADAM, DISK, built, needs_builds
from late_imports import LateModule
from launched_files import added_environment
from ranks import on_ranks
from transformers_toys import step_of

from hf_memopt.planning.cards.memory_below import Disk, MemoryBelow
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.models.accelerate_config import (
    FSDP2,
    HOST,
    NVME,
    NVME_FOLDER,
    ZERO2,
    ZERO3,
    Sharing,
    write_accelerate_config,
)
from hf_memopt.planning.simulation.child_process import run_isolated

host_optimizer_rank = LateModule("host_optimizer_rank")
transformers = LateModule("transformers")

# DeepSpeed's Adam multiplies and adds in one rounding, and divides by other quotients.
OF_DEEPSPEED = 2e-6
WIDTH = 32
OF_A_DISK = 512  # DeepSpeed leaves tensors below a MiB in memory


def trained(
    folder: Path, sharing: Sharing, max_grad_norm: float | None, width: int = WIDTH, **environment: str
) -> list[dict[str, Any]]:
    """Train in processes with the environment of `accelerate launch`, beside plain updates."""
    path = write_accelerate_config(folder / "accelerate.yaml", "no", sharing, 2, max_grad_norm)
    if NVME in (sharing.optimizer_on, sharing.weights_on):
        of_deepspeed = folder / "deepspeed.json"
        of_deepspeed.write_text(of_deepspeed.read_text().replace(NVME_FOLDER, str(folder)))
    environment |= added_environment(path)
    return on_ranks("host_optimizer_rank:outcomes", max_grad_norm, width, num_ranks=sharing.num_gpus, **environment)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fsdp2_offloads_and_trains_bitwise_as_plain_updates_do(
    num_ranks: int, max_grad_norm: float | None, tmp_path: Path
) -> None:
    for rank in trained(tmp_path, Sharing(FSDP2, num_ranks, HOST), max_grad_norm):
        assert (rank["engine"], rank["keeper"]) == ("DistributedType.FSDP", "CPUOffloadPolicy")
        assert rank["losses"] == rank["plain losses"]
        # Two ranks clip by the norm of their norms, which on some CPUs is the next number: an ulp of weights below 2.
        assert rank["difference"] <= (2**-23 if num_ranks > 1 and max_grad_norm else 0.0)


@needs_builds
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("engine", "weights_on"), [(ZERO2, "device"), (ZERO3, HOST)])
def test_deepspeed_updates_on_the_host_as_plain_updates_do(
    engine: str, weights_on: str, num_ranks: int, tmp_path: Path
) -> None:
    check_of_deepspeed(trained(tmp_path, Sharing(engine, num_ranks, HOST, weights_on), 0.5, **built(ADAM)))


@needs_builds
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("weights_on", [HOST, NVME])
def test_deepspeed_trains_from_a_disk_whose_files_are_as_large_as_simulated(
    weights_on: str, num_ranks: int, tmp_path: Path
) -> None:
    sharing = Sharing(ZERO3, num_ranks, NVME, weights_on)
    check_of_deepspeed(trained(tmp_path, sharing, 0.5, OF_A_DISK, **built(ADAM, DISK)))
    files = list(tmp_path.rglob(f"rank0/{'*' if weights_on == NVME else '[!p]*'}.swp"))
    assert files
    assert sum(file.stat().st_size for file in files) == simulated_bytes(tmp_path / "model", sharing)


def simulated_bytes(folder: Path, sharing: Sharing) -> int:
    config = transformers.LlamaConfig(**host_optimizer_rank.sizes(OF_A_DISK), architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    places = {"optimizer_on": sharing.optimizer_on, "weights_on": sharing.weights_on, "num_gpus": sharing.num_gpus}
    options = {"seq_len": 16, "batch_size": 2, "accumulation": 2, "dtype": "float32", "engine": sharing.engine}
    usual = {"loss": "full", "precision": "no", "checkpointing": "none"}
    step = step_of(str(folder), **options, **places, **usual)
    return run_isolated(lambda: simulate_step(step, below=MemoryBelow(disk=Disk()))).disk_bytes


def check_of_deepspeed(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (rank["engine"], rank["keeper"]) == ("DistributedType.DEEPSPEED", "DeepSpeedCPUAdam")
        assert rank["losses"] == pytest.approx(rank["plain losses"], rel=OF_DEEPSPEED)
        assert rank["difference"] <= OF_DEEPSPEED
