"""Binary units of memory, and times, in one form for people. Decimal units (links, disks) are written as 1e9."""

import re

KIB, MIB, GIB = 2**10, 2**20, 2**30
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def unit_for(num_bytes: float) -> tuple[str, int]:
    """Return the largest unit of which there is at least one, and its bytes: `("MiB", 2**20)`."""
    units = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    return next(((unit, size) for unit, size in units if num_bytes >= size), ("B", 1))


def format_bytes(num_bytes: float) -> str:
    """Return bytes in the largest unit of which there is at least one: `1.50 MiB`, `12 B`."""
    unit, size = unit_for(num_bytes)
    return f"{num_bytes / size:.2f} {unit}" if size > 1 else f"{num_bytes:.0f} B"


def format_gib(num_bytes: float) -> str:
    """Return bytes in GiB, for figures that stand next to each other: `0.05 GiB`."""
    return f"{num_bytes / GIB:.2f} GiB"


def format_ms(milliseconds: float) -> str:
    """Return a time with two or three digits that count: `1.69 s`, `31 ms`, `0.4 ms`."""
    if milliseconds >= 1e3:
        return f"{milliseconds / 1e3:.3g} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def parse_size(text: str, option: str = "size") -> int:
    """Return the bytes of "8GiB", "24 GB", "500MB", and of "12GBps" per second."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?(ps|/s)?\s*", text.lower())
    num_bytes = round(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if num_bytes <= 0:
        raise ValueError(f"{option}={text!r} is not a size; write, for instance, 8GiB, 24GB, or 12GBps for a link")
    return num_bytes
