"""Table and targets of `benchmarks.lgt.memory`."""

from collections.abc import Iterator
from typing import Any

from benchmarks.common import print_table
from benchmarks.targets import Verdict, formatted, ratio

HEADER = [
    "batch x Euler steps, mode",
    "peak",
    "reserved GiB",
    "step ms",
    "samples/s",
    "moved GiB/step",
    "first loss",
    "losses",
]
# What the guide that this recipe comes from says of its card of 8 GB.
CLAIMS = {(240, 5): "6.8 GB, near the limit", (240, 10): "out of memory", (32, 10): "about 5.2 GB"}
LARGEST = (240, 10)
# The large batch's samples per second, in the best mode, over those of batches of 32 accumulated twice, at least.
TARGETS = {"throughput": 1.0}


def print_report(results: dict[str, Any]) -> None:
    """The table, and what it says of the guide's figures and of the target."""
    cells = results["cells"]
    print_table(HEADER, [_row(cell) for cell in cells])
    for cell in (cell for cell in cells if "error" in cell):
        print(f"{name_of(cell)}: {cell['error'].partition('\n')[0]}")
    if results["hardware"]["device"] == "cpu":
        print("No accelerator: step times and device memory were not measured.")
        return
    print()
    for line in (*claims(cells), *verdicts(results)):
        print(line)


def claims(cells: list[dict[str, Any]]) -> Iterator[str]:
    """What was found of each."""
    for size, claim in CLAIMS.items():
        found = ", ".join(f"{cell['mode']} {_peak(cell)}" for cell in _of_size(cells, size)) or "not measured"
        yield f"batch {size[0]} x {size[1]} steps, claimed {claim}: {found}"


def verdicts(results: dict[str, Any]) -> Iterator[Verdict]:
    """Batch 240 x 10 steps against as many that are accumulated; 0 where nothing fits."""
    cells = results["cells"]
    large = [_samples_per_s(cell) for cell in _of_size(cells, LARGEST)]
    best = max((value for value in large if value is not None), default=None)
    accumulated = next((cell.get("samples_per_s") for cell in cells if cell["num_accumulated"] > 1), None)
    what = "batch 240 x 10 steps / batch 32 x 10 accumulated twice, samples/s"
    yield Verdict(what, ratio(best, accumulated), results["targets"]["throughput"], at_least=True)


def name_of(cell: dict[str, Any]) -> str:
    """Of its size and mode."""
    accumulated = f" accumulated {cell['num_accumulated']} times" if cell["num_accumulated"] > 1 else ""
    return f"{cell['batch_size']} x {cell['num_steps']}{accumulated}, {cell['mode']}"


def _of_size(cells: list[dict[str, Any]], size: tuple[int, int]) -> list[dict[str, Any]]:
    single = [cell for cell in cells if cell["num_accumulated"] == 1]
    return [cell for cell in single if (cell["batch_size"], cell["num_steps"]) == size]


def _samples_per_s(cell: dict[str, Any]) -> float | None:
    return 0.0 if _does_not_fit(cell) else cell.get("samples_per_s")


def _does_not_fit(cell: dict[str, Any]) -> bool:
    return cell.get("error", "").startswith("OutOfMemoryError")


def _row(cell: dict[str, Any]) -> list[str]:
    return [
        name_of(cell),
        _peak(cell),
        formatted(ratio(cell.get("reserved_bytes"), 2**30), "{:.2f}"),
        formatted(cell["step_ms"]["median"] if "step_ms" in cell else None, "{:.1f}"),
        formatted(cell.get("samples_per_s"), "{:.1f}"),
        formatted(ratio(cell.get("moved_bytes"), 2**30), "{:.3f}"),
        formatted(cell["losses"][0] if "losses" in cell else None, "{:.6f}"),
        {True: "equal", False: "different", None: "-"}[cell.get("losses_equal")],
    ]


def _peak(cell: dict[str, Any]) -> str:
    if "error" in cell:
        return "does not fit" if _does_not_fit(cell) else cell["error"].partition(":")[0]
    return formatted(ratio(cell.get("peak_bytes"), 2**30), "{:.2f} GiB")
