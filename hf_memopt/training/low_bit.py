"""AdamW whose states take few bits, where torchao is installed."""

from collections.abc import Callable
from typing import Any

BITS = (32, 8, 4)


def low_bit_adamw(bits: int) -> Callable[..., Any]:
    """Return torchao's AdamW with block-wise quantised states; ValueError without it."""
    if bits not in BITS[1:]:
        raise ValueError(f"optimizer_bits={bits}: AdamW's states can take {', '.join(map(str, BITS))} bits")
    try:
        from torchao import optim
    except ModuleNotFoundError as error:
        raise ValueError(f"optimizer_bits={bits} needs torchao: pip install torchao") from error
    optimizer: Callable[..., Any] = {8: optim.AdamW8bit, 4: optim.AdamW4bit}[bits]
    return optimizer
