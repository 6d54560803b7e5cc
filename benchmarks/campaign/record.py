"""What a campaign has measured: one file with everything, and the results files of the benchmarks made from it."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cells import UNFINISHED, Cell, Report, Row
from benchmarks.common import write_results
from benchmarks.targets import Verdict

FILE = "campaign.json"


@dataclass
class Record:
    """Rewritten after each cell, so that a kill costs the cell that was being measured.

    Attributes:
        folder: of the results.
        facts: hardware, link, versions, commit and date.
        entries: by the cell's title: benchmark, settings, what was found, seconds predicted and taken.
    """

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def resumed(folder: Path, earlier: Path) -> "Record":
        """With what another campaign has finished.

        Raises:
            ValueError: there is none in that folder.
        """
        path = earlier / FILE
        if not path.is_file():
            raise ValueError(f"--resume={earlier} has no {FILE}; give the --output of an earlier campaign")
        content = json.loads(path.read_text())
        entries = {title: entry for title, entry in content["entries"].items() if not _is_unfinished(entry["found"])}
        return Record(folder, content["facts"], entries)

    def continue_on(self, facts: dict[str, Any]) -> None:
        """Take the facts of the machine that measures from here on.

        Raises:
            ValueError: what was measured before was measured on something else, so that rows could not be compared.
        """
        if self.facts:
            before, now = _compared(self.facts), _compared(facts)
            if differing := [
                f"{name} {before[name]} then, {now[name]} now" for name in now if before[name] != now[name]
            ]:
                raise ValueError(f"--resume is of another campaign: {'; '.join(differing)}; begin a new one without it")
        self.facts = facts

    def add(self, cell: Cell, found: Row, predicted_s: float, seconds: float) -> None:
        self.entries[cell.title] = {
            "benchmark": cell.benchmark,
            "settings": cell.settings,
            "found": found,
            "predicted_s": round(predicted_s, 1),
            "seconds": round(seconds, 1),
        }
        write_results({"facts": self.facts, "entries": self.entries}, self.folder / FILE)
        write_results(self.results(cell.benchmark), self.folder / f"{cell.benchmark}.json")

    def rows(self, benchmark: str) -> list[Row]:
        """What its cells have found, with their settings."""
        mine = [entry for entry in self.entries.values() if entry["benchmark"] == benchmark]
        return [{**entry["settings"], **entry["found"]} for entry in mine]

    def results(self, benchmark: str) -> dict[str, Any]:
        """As the benchmark by itself would write them."""
        report, rows = report_of(benchmark), self.rows(benchmark)
        report.judge(rows)
        complete = not any(_is_unfinished(row) for row in rows)
        return {**self.facts, "benchmark": benchmark, "targets": report.targets, "cells": rows, "complete": complete}

    def benchmarks(self) -> list[str]:
        """Of which there is a cell, in their order."""
        return list(dict.fromkeys(entry["benchmark"] for entry in self.entries.values()))

    def verdicts(self) -> Iterator[tuple[str, Verdict]]:
        """Every target of every benchmark."""
        for benchmark in self.benchmarks():
            for verdict in report_of(benchmark).verdicts(self.results(benchmark)):
                yield benchmark, verdict

    def failures(self) -> list[str]:
        """Titles of the cells that ran and ended with an error."""
        found = {title: entry["found"] for title, entry in self.entries.items()}
        return [title for title, row in found.items() if "error" in row and not row["error"].startswith("not run")]

    def slowness(self, benchmark: str) -> float:
        """By how much cells of a benchmark took longer than predicted so far; of all benchmarks if it has none."""
        ran = [entry for entry in self.entries.values() if not _is_unfinished(entry["found"])]
        mine = [entry for entry in ran if entry["benchmark"] == benchmark] or ran
        predicted = sum(entry["predicted_s"] for entry in mine)
        return sum(entry["seconds"] for entry in mine) / predicted if predicted else 1.0


def report_of(benchmark: str) -> Report:
    report: Report = importlib.import_module(f"benchmarks.{benchmark}").REPORT
    return report


def _compared(facts: dict[str, Any]) -> dict[str, Any]:
    """What figures depend on."""
    hardware = facts["hardware"]
    return {"device": hardware["name"], "commit": facts["commit"], "versions": facts["versions"]}


def _is_unfinished(found: Row) -> bool:
    return found.get("error", "").startswith(UNFINISHED)
