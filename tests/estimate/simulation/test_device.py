"""The virtual accelerator follows CUDA's rules: which kernels run, in which precision, and what moves where."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.estimate.gpus import CARDS, DEFAULT_CARD, Card
from hf_memopt.estimate.simulation import autocast
from hf_memopt.estimate.simulation.child_process import run_isolated
from hf_memopt.estimate.simulation.device import DEVICE_TYPE, simulation
from hf_memopt.estimate.simulation.virtual_time import VirtualClock

HALF, WHOLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"


class Operations(TorchDispatchMode):
    """Names of torch's own operations that run inside; detaching is none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "aten" and function is not torch.ops.aten.detach.default:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@contextmanager
def operations() -> Iterator[list[str]]:
    watch = Operations()
    with watch:
        yield watch.names


def simulated(function: Callable[[torch.device], Any], card: Card = DEFAULT_CARD) -> Any:
    """What `function` returns on the virtual device, in a process of its own."""

    def run() -> Any:
        with simulation("cuda", VirtualClock(card)) as (device, _):
            return function(device)

    return run_isolated(run)


# ------------------------------------------------------------------------------------------------- attention


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


# -------------------------------------------------------------------------------------------------- autocast


AUTOCAST: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "matrix products run in half precision": (lambda whole, half: whole @ whole, HALF),
    "convolutions": (lambda whole, half: F.conv1d(whole[None], whole[:, :, None]), HALF),
    "layer norm in float32": (lambda whole, half: F.layer_norm(half, half.shape[-1:]), WHOLE),
    "losses": (lambda whole, half: F.mse_loss(half, half), WHOLE),
    "powers": (lambda whole, half: half.pow(2), WHOLE),
    "sums give float32": (lambda whole, half: half.sum(), WHOLE),
    "sums in a dtype that is named": (lambda whole, half: half.sum(0, dtype=HALF), HALF),
    "two dtypes meet in the wider one": (lambda whole, half: torch.addcmul(whole, half, half), WHOLE),
    "halves stay halves": (lambda whole, half: torch.addcmul(half, half, half), HALF),
    "other operations are left alone": (lambda whole, half: F.gelu(half), HALF),
}


@pytest.fixture(scope="module")
def autocast_dtypes() -> dict[str, torch.dtype]:
    def run(device: torch.device) -> dict[str, torch.dtype]:
        whole, half = torch.zeros(8, 8, device=device), torch.zeros(8, 8, dtype=HALF, device=device)
        with torch.autocast("cuda", HALF):
            return {name: operation(whole, half).dtype for name, (operation, _) in AUTOCAST.items()}

    return simulated(run)


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name: str, autocast_dtypes: dict[str, torch.dtype]) -> None:
    assert autocast_dtypes[name] == AUTOCAST[name][1]


def test_a_weight_is_cast_once_and_its_copy_dies_with_autocast() -> None:
    def run(device: torch.device) -> Any:
        layer, frozen = (nn.Linear(8, 8, bias=False, device=device) for _ in range(2))
        frozen.requires_grad_(False)
        x = torch.zeros(4, 8, dtype=HALF, device=device)
        counts = []
        for module in (layer, frozen):
            with operations() as names, torch.autocast("cuda", HALF):
                module(module(x))
                counts.append((names.count("_to_copy"), len(autocast._cast_weights)))
        with operations() as names, torch.autocast("cuda", HALF, cache_enabled=False):
            layer(layer(x))
        return counts, names.count("_to_copy"), len(autocast._cast_weights)

    assert simulated(run) == ([(1, 1), (2, 0)], 2, 0)


# -------------------------------------------------------------------------------------------- moving modules


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


def test_a_deep_copy_has_memory_of_its_own_that_its_views_share() -> None:
    def run(device: torch.device) -> Any:
        layer = nn.Linear(4, 4, device=device)
        twin = copy.deepcopy(layer)
        addresses = [tensor.untyped_storage()._cdata for tensor in (layer.weight, twin.weight, twin.weight.t())]
        return addresses[0] != addresses[1], addresses[1] == addresses[2]

    assert simulated(run) == (True, True)


def test_an_accelerator_made_inside_is_on_the_virtual_device() -> None:
    def run(device: torch.device) -> Any:
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
        model = accelerator.prepare(nn.Linear(4, 4))
        output = model(torch.zeros(2, 4, device=accelerator.device))
        return accelerator.device.type, model.weight.device.type, output.dtype, torch.cuda.is_available()

    # The output is float32 since accelerate converts what autocast has left in half precision.
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
