"""Activation offloading under DDP and FSDP2, for test_offload_two_processes.py."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adversarial_copier import AdversarialCopier
from safetensors.torch import save_file
from tiny_decoders import tiny_decoder
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from hf_memopt import ActivationOffloader
from hf_memopt.activations import InfeasibleBudgetError
from hf_memopt.activations.planner.offload_plan import make_plan
from hf_memopt.callbacks import ActivationOffloadCallback, attach
from hf_memopt.transfer import Copier
from hf_memopt.transfer.tier import Tier


class WatchingCopier(AdversarialCopier):
    """Counts copies of whole, gathered parameters of `model` to the host."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__("late")
        self._model = model
        self.num_weights = 0

    def to_host(self, source: Tensor, destination: Tensor) -> Any:
        whole = [p for p in self._model.parameters() if not isinstance(p, DTensor)]
        self.num_weights += source.untyped_storage().data_ptr() in {p.untyped_storage().data_ptr() for p in whole}
        return super().to_host(source, destination)


def everything(copier: Copier) -> ActivationOffloader:
    return ActivationOffloader(mode="all", offload_threshold_mb=0, copier=copier)


# ------------------------------------------------------------------------------------------------ DDP


def train_under_ddp(folder: Path, how: str) -> None:
    """Take 4 steps by Trainer, each of 2 micro-batches over the ranks."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (16,), generator=generator) for _ in range(32)]
    model = tiny_decoder()
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "output_dir": str(folder)}
    arguments = TrainingArguments(
        max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, **quiet
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    offloader = everything(AdversarialCopier("late"))
    if how == "disk":
        offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, disk=folder)
    if how in ("attach", "disk"):
        attach(trainer, offloader=offloader)
    elif how == "callback":
        trainer.add_callback(ActivationOffloadCallback(offloader))
    trainer.train()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / f"ddp_{how}_{dist.get_rank()}")
    counts = {
        "moved": offloader.stats.bytes_moved,
        "live": offloader.stats.host_bytes_live + offloader.stats.disk_bytes_live,
    }
    (folder / f"ddp_{how}_{dist.get_rank()}.json").write_text(json.dumps(counts))


# ------------------------------------------------------------------------------------------------ FSDP2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def blocks(sharded: bool, policy: MixedPrecisionPolicy) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    if not sharded:
        return model if policy.param_dtype is None else model.to(policy.param_dtype)
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def batch(rank: int, dtype: torch.dtype | None) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(rank)).to(dtype or torch.float32)


def train_under_fsdp(folder: Path, how: str, precision: str) -> None:
    """Take 3 steps of SGD; save whole gradients and counts of copies to the host."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision == "bf16" else None)
    model = blocks(sharded=how != "one_process", policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copier = WatchingCopier(model)
    offloader = everything(copier)
    if how == "wrap":
        offloader.wrap(model)
    gradients = {}
    for step in range(3):
        context = offloader.offload_context(model) if how in ("context", "one_process") else nullcontext()
        with context:
            output = model(batch(dist.get_rank(), policy.param_dtype))
        output.float().square().mean().backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[f"{step}.{name}"] = whole.clone().contiguous()
        optimizer.step()
        optimizer.zero_grad()
    name = f"fsdp_{how}_{precision}_{dist.get_rank()}"
    save_file(gradients, folder / name)
    counts = {
        "moved": copier.bytes_to_host,
        "live": offloader.stats.host_bytes_live,
        "weights_moved": copier.num_weights,
    }
    (folder / f"{name}.json").write_text(json.dumps(counts))


def penalty_on_sharded_weights(folder: Path) -> None:
    """Compare a loss on sharded weights, whose saved tensors are DTensors."""
    results = {}
    for how in ("plain", "context"):
        model = blocks(sharded=True, policy=MixedPrecisionPolicy())
        offloader = everything(AdversarialCopier("late"))
        with offloader.offload_context(model) if how == "context" else nullcontext():
            penalty = sum((torch.tanh(p * 2) * p).sum() for p in model.parameters()).full_tensor()
        moved = offloader.stats.bytes_moved
        penalty.backward()
        whole = {name: p.grad.full_tensor().contiguous() for name, p in model.named_parameters()}
        save_file(whole, folder / f"dtensor_{how}_{dist.get_rank()}")
        results[how] = {"moved": moved}
    (folder / f"dtensor_{dist.get_rank()}.json").write_text(json.dumps(results))


# ------------------------------------------------------------------------------------------------ budgets


def keep_a_budget(folder: Path) -> None:
    """Give the second rank an eightfold batch, so that a budget can suffice for the first alone."""
    smallest = {}
    for name, budget_gib in (("impossible", 1e-9), ("in_between", None), ("enough", 1.0)):
        if budget_gib is None:  # enough for the first rank's batch, too little for the second's
            budget_gib = 2 * min(smallest.values())
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
        offloader = ActivationOffloader(offload_threshold_mb=0, budget_gib=budget_gib, copier=AdversarialCopier())
        outcome: dict[str, Any] = {"needed_bytes": None, "budget_gib": budget_gib}
        try:
            for step in range(4):
                outcome["step"] = step
                with offloader.offload_context(model):
                    loss = model(torch.randn(4 + 28 * dist.get_rank(), 16) * 1).square().mean()
                loss.backward()
        except InfeasibleBudgetError as error:
            outcome |= {"needed_bytes": error.smallest_bytes, "message": str(error)}
        own = [planner.recording.profile for planners in offloader._planners.values() for planner in planners.values()]
        alone = make_plan(own[0], (Tier("host", 1e9, 1e9),), budget_bytes=None, max_slowdown=1e9, prefetch_ahead=0)
        demands = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
        dist.all_gather(demands, torch.tensor(alone.predicted_peak_bytes))
        smallest = {rank: int(demand) / 2**30 for rank, demand in enumerate(demands)}
        outcome["demands"] = [int(demand) for demand in demands]
        (folder / f"budget_{name}_{dist.get_rank()}.json").write_text(json.dumps(outcome))


def train(run_folder: str) -> None:
    """Save weights, gradients and byte counts in files named after case and rank."""
    folder = Path(run_folder)
    for how in ("plain", "attach", "callback", "disk"):
        train_under_ddp(folder, how)
    for precision in ("fp32", "bf16"):
        for how in ("plain", "context", "wrap", "one_process"):
            train_under_fsdp(folder, how, precision)
    penalty_on_sharded_weights(folder)
    keep_a_budget(folder)
