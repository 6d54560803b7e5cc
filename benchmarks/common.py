"""The common parts of benchmarks: facts about the machine, its memory, results files and tables."""

import argparse
import gc
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.timing import median_and_spread, step_times_ms
from hf_memopt.memory.device_counters import device_name
from hf_memopt.report.doctor import version_of
from hf_memopt.text_table import align
from hf_memopt.transfer.host_memory import cgroup_limits, pinned_empty

CPU = torch.device("cpu")
MIB = 2**20
# Share of a card's nominal memory that the CUDA context and the desktop leave: 7.3 GiB of 8 GB.
USABLE_SHARE = 0.9125
LINK_PROBE_BYTES = 2**28
RESULTS_FOLDER = Path(__file__).parent / "results"
_PACKAGES = ("hf_memopt", "torch", "transformers", "accelerate", "trl", "lerobot", "diffusers")


def current_device() -> torch.device:
    """Return the current accelerator, with the index that some of torch's functions need; or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def limit_memory(card_gb: float | None) -> None:
    if torch.cuda.is_available():
        total_bytes = torch.cuda.mem_get_info()[1]
        share = 1.0 if card_gb is None else min(1.0, round(USABLE_SHARE * card_gb * 2**30) / total_bytes)
        torch.cuda.set_per_process_memory_fraction(share)


def measure(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the facts about the machine: `environment`, and the speed of the link each way."""
    device = current_device()
    return {**environment(device), "link_gb_per_s": link_gb_per_s(device)}


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "hardware": _hardware(device),
        "versions": {name: version_of(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "commit": measured_commit(),
        "date": date.today().isoformat(),
    }


def _hardware(device: torch.device) -> dict[str, Any]:
    facts = {
        "device": device.type,
        "name": device_name(device),
        "num_cpu_threads": torch.get_num_threads(),
        "host_memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if device.type != "cpu":
        facts["device_memory_gib"] = round(torch.accelerator.get_memory_info(device)[1] / 2**30, 1)
        facts["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    return facts


def measured_commit() -> str | None:
    """Return the commit of the checkout, with `-dirty` if tracked files differ from it.

    In a checkout without git, `HF_MEMOPT_COMMIT` holds the commit (`make gpu-bundle`); else None.
    """
    if commit := os.environ.get("HF_MEMOPT_COMMIT"):
        return commit
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def host_limit_gib() -> float:
    """Return most of the machine's memory, or of the limit of this process's control groups."""
    return round(0.7 * min([psutil.virtual_memory().total, *cgroup_limits()]) / 2**30, 1)


def link_gb_per_s(device: torch.device) -> dict[str, float] | None:
    if device.type == "cpu":
        return None
    host = pinned_empty(LINK_PROBE_BYTES, device)
    there = torch.empty(LINK_PROBE_BYTES, dtype=torch.uint8, device=device)
    copies = {
        "to_device": lambda: there.copy_(host, non_blocking=True),
        "to_host": lambda: host.copy_(there, non_blocking=True),
    }
    times = {way: step_times_ms(copy, device, max_steps=5, max_seconds=5) for way, copy in copies.items()}
    return {way: LINK_PROBE_BYTES / 1e6 / median_and_spread(found)["median"] for way, found in times.items()}


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def pinned_bytes(device: torch.device) -> int | None:
    """Return the page-locked bytes in use by torch's allocator, with its rounding; None without CUDA."""
    return torch.cuda.host_memory_stats().get("active_bytes.current", 0) if device.type == "cuda" else None


def host_rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def write_results(results: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(unfinished, path)
    return path


class BenchmarkParser(argparse.ArgumentParser):
    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def options(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the command line, with the file of results as the last option."""
        self.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
        return self.parse_args(arguments)


def finish(
    results: dict[str, Any],
    print_report: Callable[[dict[str, Any]], None],
    output: Path | None,
    theme: str,
    device: torch.device = CPU,
) -> None:
    """Print and store the results, without an output file in that of the theme and the device."""
    print_report(results)
    print("wrote", write_results(results, output or results_path(theme, device)))


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def results_path(theme: str, device: torch.device) -> Path:
    return RESULTS_FOLDER / f"{theme}-{slug(device_name(device))}.json"


def highest_points(points: Iterable[tuple[float, float]], per_unit: float) -> list[tuple[float, float]]:
    """Return the highest of the points `(place, height)` in each stretch, of which a unit has `per_unit`."""
    highest: dict[int, tuple[float, float]] = {}
    for point in points:
        stretch = int(per_unit * point[0])
        highest[stretch] = max(highest.get(stretch, point), point, key=itemgetter(1))
    return list(highest.values())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    head, *lines = align([header, *rows], "<>")
    print("\n".join([head, "-" * max(map(len, (head, *lines))), *lines]))


def print_errors(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        if "error" in row:
            print(f"{name}: {row['error'].splitlines()[0]}")


def print_rows(rows: Sequence[dict[str, str]]) -> None:
    """Print a table of rows with named cells, and a dash for each cell that a row lacks."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    print_table(header, [[row.get(name, "-") for name in header] for row in rows])
