"""Offloading in a small Llama, two shards or tensor parallel; cases such as `auto+lora+bf16`, or `teachers`."""

from contextlib import nullcontext
from typing import Any

import torch
from adversarial_copier import AdversarialCopier
from peft import LoraConfig, get_peft_model
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt import ActivationOffloader, OffloadedTeacher, SyncCopier
from hf_memopt.weights.offload import TeacherMode

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
NUM_STEPS = 4  # two recorded steps, and two that follow the plan
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def model_for(conditions: set[str]) -> nn.Module:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, max_position_embeddings=32))
    if "lora" in conditions:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    if "checkpointing" in conditions:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    layers = [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    mesh = init_device_mesh("cpu", (2,))
    if "tensor_parallel" in conditions:
        for layer in layers:
            plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
            parallelize_module(layer, mesh, plan)
        return model
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if "bf16" in conditions else None)
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def tokens(step: int, conditions: set[str]) -> Tensor:
    """Return equal batches under tensor parallelism, other lengths on each rank under "unequal"."""
    rank = 0 if "tensor_parallel" in conditions else distributed.get_rank()
    length = 12 + 9 * rank if "unequal" in conditions else 16
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(10 * step + rank))


def train(conditions: set[str], offloader: ActivationOffloader | None) -> list[Tensor]:
    """Return all steps' gradients, in this rank's shards."""
    model = model_for(conditions)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.1)
    gradients = []
    for step in range(NUM_STEPS):
        batch = tokens(step, conditions)
        with nullcontext() if offloader is None else offloader.offload_context(model):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        for parameter in learning:
            assert parameter.grad is not None
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            gradients.append(local.clone())
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def outcome(case: str) -> dict[str, Any]:
    mode, *named = case.split("+")
    conditions = set(named)
    offloader = ActivationOffloader(
        mode=mode,  # type: ignore[arg-type]
        offload_threshold_mb=0,
        max_slowdown=1e9,
        copier=AdversarialCopier("late"),
    )
    plain, offloaded = train(conditions, None), train(conditions, offloader)
    return {
        "equal": len(plain) == len(offloaded) and all(map(torch.equal, plain, offloaded)),
        "learns": any(each.count_nonzero() for each in plain),
        "moved": offloader.stats.bytes_moved,
        "live": offloader.stats.host_bytes_live,
    }


def distilled(mode: TeacherMode | None) -> list[Tensor]:
    """Return a sharded student's gradients from a whole teacher on the host."""
    torch.manual_seed(1)
    config = LlamaConfig(**SIZES, num_attention_heads=4, max_position_embeddings=32)
    teacher: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    offloaded = None if mode is None else OffloadedTeacher(teacher, device="cpu", mode=mode, copier=SyncCopier())
    student = model_for(set())
    gradients = []
    for step in range(2):
        batch = tokens(step, set())
        logits = student(input_ids=batch).logits
        with nullcontext() if offloaded is None else offloaded.onload(), torch.no_grad():
            wanted = teacher(input_ids=batch).logits
        (logits - wanted).square().mean().backward()
        gradients += [parameter.grad.to_local().clone() for parameter in student.parameters()]
        student.zero_grad()
    return gradients


def refusal_of_its_own_base() -> str:
    student = model_for({"lora"})
    try:
        OffloadedTeacher(student, device="cpu", share_with=student)
    except ValueError as error:
        return str(error)
    return "none"


def teachers() -> dict[str, Any]:
    plain = distilled(None)
    modes: tuple[TeacherMode, ...] = ("swap", "stream")
    return {
        "equal": {mode: all(map(torch.equal, plain, distilled(mode))) for mode in modes},
        "learns": any(each.count_nonzero() for each in plain),
        "refusal": refusal_of_its_own_base(),
    }


def outcomes(*cases: str) -> dict[str, Any]:
    distributed.init_process_group("gloo")
    return {case: teachers() if case == "teachers" else outcome(case) for case in cases}
