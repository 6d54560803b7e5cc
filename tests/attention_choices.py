"""Torch's choice of attention kernel on CUDA by case; run as a script, it adds the device's column to the `.csv`.

Nothing is computed, so a stand-in for the CUDA runtime will do, which can be asked as any device.
"""

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

TABLE = Path(__file__).with_name("attention_choices.csv")
KERNELS = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WIDTHS = (16, 33, 36, 40, 44, 64, 72, 80, 96, 128, 160, 192, 200, 240, 256, 264)
# Differences from two heads and 128 queries and keys that require grad.
VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"mask": "bool"},
    "expanded mask": {"mask": "expanded"},
    "mask with grad": {"mask": "grad"},
}
MORE_VARIATIONS: dict[str, dict[str, Any]] = {
    "without grad": {"needs_grad": False},
    "dropout 0.1": {"dropout_p": 0.1},
    "dropout 0.125": {"dropout_p": 0.125},
    "one query": {"num_queries": 1},
    "one query with dropout": {"num_queries": 1, "dropout_p": 0.125},
    "one key": {"num_keys": 1},
    "causal with fewer queries": {"is_causal": True, "num_queries": 100},
    "uneven lengths": {"num_queries": 100, "num_keys": 77},
    "narrow values": {"value_width": 48},
    "interleaved": {"is_interleaved": True},
    "last dimension apart": {"is_transposed": True},
    "batch of one key": {"key_batch": 1},
    "three dimensions": {"is_flat": True},
}
MORE_WIDTHS = (64, 192, 200, 240, 256)


class Case(NamedTuple):
    """A call of `scaled_dot_product_attention`; `variation` is a key of `VARIATIONS` or `MORE_VARIATIONS`."""

    dtype: str
    width: int
    grouped: bool
    variation: str


def all_cases() -> Iterator[Case]:
    """Return the table's cases in order."""
    for variations, widths in ((VARIATIONS, WIDTHS), (MORE_VARIATIONS, MORE_WIDTHS)):
        yield from itertools.starmap(Case, itertools.product(DTYPES, widths, (False, True), variations))


def arguments(case: Case, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Return uninitialised arguments of `scaled_dot_product_attention`."""
    options = {**VARIATIONS, **MORE_VARIATIONS}[case.variation]
    num_queries, num_keys = options.get("num_queries", 128), options.get("num_keys", 128)
    key_heads, key_batch = (2 if case.grouped else 4), options.get("key_batch", 2)
    query, key, value = (
        _operand(shape, case, options, device)
        for shape in (
            (2, 4, num_queries, case.width),
            (key_batch, key_heads, num_keys, case.width),
            (key_batch, key_heads, num_keys, options.get("value_width", case.width)),
        )
    )
    mask = _mask(options.get("mask"), query, num_keys)
    dropout_p, is_causal = options.get("dropout_p", 0.0), options.get("is_causal", False)
    return [query, key, value, mask, dropout_p, is_causal], {"enable_gqa": case.grouped}


def _operand(shape: tuple[int, ...], case: Case, options: dict[str, Any], device: torch.device) -> Tensor:
    batch, heads, length, width = shape
    if "is_flat" in options:
        shape = (heads, length, width)
    if "is_interleaved" in options:
        shape = (batch, length, heads, width)
    if "is_transposed" in options:
        shape = (batch, heads, width, length)
    made = torch.empty(shape, dtype=DTYPES[case.dtype], device=device, requires_grad=options.get("needs_grad", True))
    if "is_interleaved" in options:
        return made.transpose(1, 2)
    return made.transpose(2, 3) if "is_transposed" in options else made


def _mask(kind: str | None, query: Tensor, num_keys: int) -> Tensor | None:
    shape = (*query.shape[:-1], num_keys)
    if kind is None:
        return None
    if kind == "bool":
        return torch.empty((query.shape[0], 1, *shape[2:]), dtype=torch.bool, device=query.device)
    if kind == "expanded":
        return torch.empty((1, 1, 1, num_keys), dtype=query.dtype, device=query.device).expand(shape)
    return torch.empty(shape, dtype=query.dtype, device=query.device, requires_grad=True)


def chosen(case: Case) -> str:
    """Return torch's kernel for the CUDA device."""
    positional, named = arguments(case, torch.device("cuda"))
    return KERNELS[torch._fused_sdp_choice(*positional, **named)]


def read() -> dict[Case, dict[tuple[int, int], str]]:
    """Return each case's kernels by compute capability."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        case = Case(row.pop("dtype"), int(row.pop("width")), row.pop("grouped") == "True", row.pop("variation"))
        found[case] = {(int(name.split(".")[0]), int(name.split(".")[1])): kernel for name, kernel in row.items()}
    return found


def _record() -> None:
    capability = torch.cuda.get_device_capability()
    known = read()
    table = {case: {**known.get(case, {}), capability: chosen(case)} for case in all_cases()}
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        columns = sorted(next(iter(table.values())))
        writer.writerow([*Case._fields, *(f"{major}.{minor}" for major, minor in columns)])
        writer.writerows([*case, *(kernels[column] for column in columns)] for case, kernels in table.items())


if __name__ == "__main__":
    _record()
