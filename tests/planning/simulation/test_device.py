"""CUDA's rules of kernels, precision and moves on the virtual accelerator."""

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated import operations, simulated
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_memopt.planning.cards.gpus import CARDS
from hf_memopt.planning.simulation import DEVICE_TYPE
from hf_memopt.transfer.backends import backend_of

HALF, WHOLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"


def attention_kernels(
    device: torch.device, dtype: torch.dtype, width: int = 64, mask: str = "", key_heads: int = 4, **options: Any
) -> set[str]:
    query = torch.zeros(2, 4, 20, width, dtype=dtype, device=device, requires_grad=True)
    key = torch.zeros(2, key_heads, 20, width, dtype=dtype, device=device, requires_grad=True)
    masks = {"": None, "bool": torch.ones(2, 1, 20, 20, dtype=torch.bool, device=device)}
    masks["additive"] = torch.zeros(2, 1, 20, 20, dtype=dtype, device=device)
    with operations() as names:
        result = F.scaled_dot_product_attention(query, key, key, masks[mask], enable_gqa=key_heads != 4, **options)
        result.sum().backward()
    assert result.shape == query.shape
    assert query.grad is not None
    return {name for name in names if "attention" in name and "backward" not in name}


ATTENTION = {
    "half": ({"dtype": HALF}, {FLASH}),
    "half, causal": ({"dtype": HALF, "is_causal": True}, {FLASH}),
    "fp16, the widest heads": ({"dtype": torch.float16, "width": 256}, {FLASH}),
    "heads that are too wide": ({"dtype": HALF, "width": 264}, {EFFICIENT}),
    "a width that flash pads": ({"dtype": HALF, "width": 60}, {FLASH}),
    "grouped queries": ({"dtype": HALF, "key_heads": 2}, {FLASH}),
    "float32": ({"dtype": WHOLE}, {EFFICIENT}),
    "float32, grouped queries": ({"dtype": WHOLE, "key_heads": 2}, set()),
    "a mask": ({"dtype": HALF, "mask": "bool"}, {EFFICIENT}),
    "an additive mask": ({"dtype": WHOLE, "mask": "additive"}, {EFFICIENT}),
    "float64": ({"dtype": DOUBLE}, set()),
}


@pytest.fixture(scope="module")
def kernels_chosen() -> dict[str, Any]:
    def choose(device: torch.device) -> dict[str, Any]:
        chosen: dict[str, Any] = {
            name: attention_kernels(device, **options) for name, (options, _) in ATTENTION.items()
        }
        with sdpa_kernel(SDPBackend.MATH):
            chosen["math asked for"] = attention_kernels(device, HALF)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            chosen["efficient asked for"] = attention_kernels(device, HALF)
        flat = torch.zeros(4, 20, 64, dtype=HALF, device=device)
        with operations() as names:
            F.scaled_dot_product_attention(flat, flat, flat)
        chosen["three dimensions"] = {FLASH, EFFICIENT} & set(names)
        query = torch.zeros(2, 4, 20, 64, device=device)
        with operations() as names, torch.autocast("cuda", HALF):
            F.scaled_dot_product_attention(query, query, query)
        chosen["autocast"] = {FLASH, EFFICIENT} & set(names)
        host = torch.zeros(2, 4, 20, 64)
        with operations() as names:
            F.scaled_dot_product_attention(host, host, host)
        chosen["on the host"] = {FLASH, EFFICIENT} & set(names)
        return chosen

    return simulated(choose)


EXPECTED = {name: expected for name, (_, expected) in ATTENTION.items()} | {
    "math asked for": set(),
    "efficient asked for": {EFFICIENT},
    "three dimensions": set(),
    "autocast": {FLASH},
    "on the host": set(),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_attention_kernel(name: str, kernels_chosen: dict[str, Any]) -> None:
    assert kernels_chosen[name] == EXPECTED[name]


@pytest.mark.parametrize(("card", "expected"), [("h100", {CUDNN}), ("a100-80gb", {FLASH}), ("t4", set())], ids=str)
def test_the_card_decides_the_attention_kernel(card: str, expected: set[str]) -> None:
    options: dict[str, Any] = {"dtype": HALF, "key_heads": 2}
    assert simulated(lambda device: attention_kernels(device, **options), CARDS[card]) == expected


def test_softmax_from_float16_to_float32_is_one_kernel_and_from_bfloat16_two() -> None:
    def run(device: torch.device) -> dict[str, Any]:
        found = {}
        for dtype in (torch.float16, HALF):
            scores = torch.zeros(4, 8, dtype=dtype, device=device, requires_grad=True)
            for softmax in (F.softmax, F.log_softmax):
                with operations() as names:
                    result = softmax(scores, dim=-1, dtype=WHOLE)
                found[f"{softmax.__name__} of {dtype}"] = names, result.dtype
            with operations() as names, torch.autocast("cuda", dtype):
                result = F.softmax(scores, dim=-1)
            found[f"autocast to {dtype}"] = names, result.dtype
        return found

    assert simulated(run) == {
        "softmax of torch.float16": (["_softmax"], WHOLE),
        "log_softmax of torch.float16": (["_log_softmax"], WHOLE),
        "autocast to torch.float16": (["_softmax"], WHOLE),
        "softmax of torch.bfloat16": (["_to_copy", "_softmax"], WHOLE),
        "log_softmax of torch.bfloat16": (["_to_copy", "_log_softmax"], WHOLE),
        "autocast to torch.bfloat16": (["_to_copy", "_softmax"], WHOLE),
    }


def test_modules_move_with_their_ties_and_stay_their_optimizers() -> None:
    def run(device: torch.device) -> Any:
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8))
        model[1].weight = model[0].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = [id(parameter) for parameter in model.parameters()]
        model.to(device).to(HALF)
        tied = model[1].weight is model[0].weight
        kept = [id(p) for p in optimizer.param_groups[0]["params"]] == before == [id(p) for p in model.parameters()]
        devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
        return tied, kept, devices, model[0].weight.dtype

    tied, kept, devices, dtype = simulated(run)
    assert tied
    assert kept
    assert devices == {DEVICE_TYPE}
    assert dtype == HALF


def test_an_accelerator_made_inside_is_on_the_virtual_device() -> None:
    def run(device: torch.device) -> Any:
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
        model = accelerator.prepare(nn.Linear(4, 4))
        output = model(torch.zeros(2, 4, device=accelerator.device))
        return accelerator.device.type, model.weight.device.type, output.dtype, torch.cuda.is_available()

    # Accelerate converts autocast's half-precision outputs to float32.
    assert simulated(run) == (DEVICE_TYPE, DEVICE_TYPE, WHOLE, False)


def test_optimizers_and_clipping_take_their_default_path_for_cuda() -> None:
    def run(device: torch.device) -> list[str]:
        model = nn.Linear(4, 4, device=device)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.zeros(2, 4, device=device)).sum().backward()
        with operations() as names:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return names

    assert {"_foreach_norm", "_foreach_mul_", "_foreach_sqrt"} <= set(simulated(run))


def test_host_memory_has_no_end() -> None:
    assert simulated(lambda device: backend_of(device).free_host_bytes()) == sys.maxsize
