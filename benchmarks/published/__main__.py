"""Estimates of published measurements on real GPUs, beside the measured figures.

    python -m benchmarks.published

Every configuration with a figure of memory is estimated once, without a GPU. The results file, a table of all rows
(CSV) and the summaries in docs/published_measurements.md are written. With --only, rows whose name contains a text are
estimated, and nothing is written.
"""

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common import CPU, MIB, RESULTS_FOLDER, environment, write_results
from benchmarks.published import times
from benchmarks.published.measurements import Measurement, measurements, sources
from benchmarks.published.steps import estimate

RESULTS = RESULTS_FOLDER / "published.json"
TABLE = RESULTS.with_suffix(".csv")
PAGE = Path(__file__).parents[2] / "docs" / "published_measurements.md"
BEGIN, END = "<!-- python -m benchmarks.published writes this -->", "<!-- up to here -->"
TIMES = "<!-- python -m benchmarks.published writes this: times -->", "<!-- up to here: times -->"
FIGURES = {"allocated_mib": "allocated", "reserved_mib": "reserved"}
# Fields that do not change the simulation.
_RECORD = ("id", "source", "role", "stack", "unknown", "time_unknown", "not_simulated", "other_mib", "step_s", *FIGURES)


def configuration(measured: Measurement) -> str:
    """Return the simulated configuration as a key: repeated measurements share an estimate."""
    return json.dumps({key: value for key, value in asdict(measured).items() if key not in _RECORD}, sort_keys=True)


def figures(measured: Measurement) -> dict[str, float]:
    found = estimate(measured)
    return {"allocated_mib": found.peak_bytes / MIB, "reserved_mib": found.reserved_bytes / MIB}


def compare(rows: list[Measurement]) -> list[dict[str, Any]]:
    known: dict[str, dict[str, float]] = {}
    compared = []
    for row in tqdm(rows, unit="row"):
        key = configuration(row)
        if not row.not_simulated and key not in known:
            known[key] = figures(row)
        compared.append({"source": row.source, "id": row.id, "estimate": None if row.not_simulated else known[key]})
    return compared


def deviations(
    results: dict[str, Any], figure: str, *, is_known: bool | None = None, source: str | None = None
) -> list[float]:
    """Return relative deviations of estimates; `is_known`: of rows whose configuration is fully known, or is not."""
    rows = {row.name: row for row in measurements()}
    found = []
    for compared in results["rows"]:
        row = rows[f"{compared['source']} {compared['id']}"]
        measured = getattr(row, figure)
        if compared["estimate"] and measured and is_known in (None, not row.unknown) and source in (None, row.source):
            found.append(compared["estimate"][figure] / measured - 1)
    return found


def report(results: dict[str, Any]) -> str:
    return "\n".join([*_summary(results), "", *_by_source(results)])


def _summary(results: dict[str, Any]) -> Iterator[str]:
    yield "| configuration | figure | rows | median deviation | worst |"
    yield "|---|---|---|---|---|"
    for is_known, name in ((True, "fully known"), (False, "with gaps")):
        for figure, title in FIGURES.items():
            found = deviations(results, figure, is_known=is_known)
            if found:
                median = statistics.median(map(abs, found))
                worst = max(found, key=abs)
                yield f"| {name} | {title} | {len(found)} | {median:.2%} | {worst:+.2%} |"


def _by_source(results: dict[str, Any]) -> Iterator[str]:
    yield "| source | licence | rows | median deviation | worst |"
    yield "|---|---|---|---|---|"
    for source, file in sources().items():
        found = deviations(results, "allocated_mib", source=source)
        if found:
            figures = f"{len(found)} | {statistics.median(map(abs, found)):.2%} | {max(found, key=abs):+.2%}"
            yield f"| {file['source']}; {file['kind']} | {file['licence']} | {figures} |"


def rows_as_text(results: dict[str, Any]) -> list[list[str]]:
    estimates = {(row["source"], row["id"]): row["estimate"] or {} for row in results["rows"]}
    table = [
        [
            "source",
            "model",
            "step",
            *(f"{name} MiB{of}" for name in FIGURES.values() for of in ("", ", estimate")),
            "remark",
        ]
    ]
    for row in measurements():
        if row.has_memory:
            estimated = estimates.get((row.source, row.id), {})
            figures = [each for name in FIGURES for each in (getattr(row, name), estimated.get(name))]
            cells = ["" if each is None else f"{each:.1f}" for each in figures]
            remarks = [row.not_simulated and f"not simulated: {row.not_simulated}", row.unknown]
            if row.other_mib:
                remarks.insert(0, f"{row.other_mib:,.0f} MiB measured")
            table.append([row.source, row.model, _step(row), *cells, "; ".join(filter(None, remarks))])
    return table


def _step(row: Measurement) -> str:
    size = f"{row.batch_size}" if row.seq_len is None else f"{row.batch_size} x {row.seq_len}"
    weights = row.base or {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[row.dtype]
    training = "full" if row.lora_rank is None else f"LoRA {row.lora_rank}"
    parts = [weights, training, row.attention, size, row.gpu.upper()]
    return ", ".join([*parts, *(["checkpointed"] if row.checkpointing else [])])


def write_page(results: dict[str, Any], page: Path) -> None:
    write_between(report(results), (BEGIN, END), page)


def write_between(text: str, marks: tuple[str, str], page: Path) -> None:
    begin, end = marks
    whole = page.read_text(encoding="utf-8")
    if begin not in whole or end not in whole:
        raise ValueError(f"{page}: there is no {begin!r} with {end!r} after it; put them where the table belongs")
    before, after = whole.split(begin)[0], whole.split(end)[1]
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose source, place or model holds this text")
    parser.add_argument(
        "--page", action="store_true", help="only write the page again, from the results that are there"
    )
    options = parser.parse_args(arguments)
    if options.page:
        results = json.loads(RESULTS.read_text())
    else:
        rows = [row for row in measurements() if row.has_memory and options.only in f"{row.name} {row.model}"]
        results = {**environment(CPU), "benchmark": "published", "rows": compare(rows)}
    print(report(results))
    if not options.only:
        write_results(results, RESULTS)
        write_page(results, PAGE)
        write_between(times.report(times.unseen()), TIMES, PAGE)
        with TABLE.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows_as_text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
