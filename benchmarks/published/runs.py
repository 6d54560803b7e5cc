"""Published training runs, asked of `hf-memopt estimate` as a user would.

    python -m benchmarks.published.runs

Each run is one command, whose flags stand in runs/*.json: all of them take ten minutes on one core, without a GPU.
The results file and the table in docs/published_runs.md are written. With --only, runs whose place, model or flags hold
a text are asked anew, and the others stay as they are in the results file.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common import CPU, MIB, RESULTS_FOLDER, environment, write_results
from benchmarks.published.__main__ import write_between
from benchmarks.published.measurements import model_config

RESULTS = RESULTS_FOLDER / "published-runs.json"
PAGE = Path(__file__).parents[2] / "docs" / "published_runs.md"
MARKS = "<!-- python -m benchmarks.published.runs writes this -->", "<!-- up to here -->"


def sources() -> list[dict[str, Any]]:
    """Return the files: each with `source`, `address`, `licence`, `kind` of figure, `gpu`, `stack` and `rows`.

    A row may have a `remark` on what its source leaves open or does in another way.
    """
    return [json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "runs").glob("*.json"))]


def ask(row: dict[str, Any], gpu: str) -> dict[str, Any]:
    """Return the command's answer: allocated, reserved and needed MiB, and the verdict on the card."""
    with tempfile.TemporaryDirectory() as folder:
        config, answer = Path(folder, "config.json"), Path(folder, "answer.json")
        config.write_text(json.dumps(model_config(row["model"])))
        words = ["estimate", str(config), *row["flags"].split(), "--gpu", gpu, "--json", str(answer)]
        subprocess.run([sys.executable, "-m", "hf_memopt.cli", *words], check=True, stdout=subprocess.DEVNULL)
        found = json.loads(answer.read_text())
    return {
        "allocated_mib": found["peak_bytes"] / MIB,
        "reserved_mib": found["reserved_bytes"] / MIB,
        "needed_mib": found["needed_bytes"] / MIB,
        "verdict": found["card"]["verdict"],
    }


def compare(only: str, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    known = {row["id"]: row["answer"] for row in before}
    rows = [(source["gpu"], row) for source in sources() for row in source["rows"]]
    compared = []
    for gpu, row in tqdm(rows, unit="run"):
        is_asked = only in f"{row['id']} {row['model']} {row['flags']}" or row["id"] not in known
        compared.append({"id": row["id"], "answer": ask(row, gpu) if is_asked else known[row["id"]]})
    return compared


def measured(row: dict[str, Any]) -> str | None:
    """Return the name of a run's published figure, or None where it ran out of memory."""
    return next((name for name in ("allocated_mib", "reserved_mib", "needed_mib") if name in row), None)


def is_right(row: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Return whether the verdict came true."""
    return bool(row.get("ran", True) == (answer["verdict"] != "does not fit"))


def report(results: dict[str, Any]) -> str:
    answers = {row["id"]: row["answer"] for row in results["rows"]}
    return "\n\n".join("\n".join(_table(source, answers)) for source in sources())


def _table(source: dict[str, Any], answers: dict[str, Any]) -> Iterator[str]:
    yield f"[{source['source']}]({source['address']}), {source['licence']}; {source['gpu']}; {source['kind']}."
    yield ""
    yield "| row | run | measured, GiB | estimate | deviation | verdict |"
    yield "|---|---|---|---|---|---|"
    for row in source["rows"]:
        answer, kind = answers[row["id"]], measured(row) or "allocated_mib"
        deviation = f"{answer[kind] / row[kind] - 1:+.1%}" if kind in row else ""
        figure = f"{row[kind] / 1024:.2f}" if kind in row else "out of memory"
        judged = answer["verdict"] if is_right(row, answer) else f"**{answer['verdict']}**"
        run = f"{row['model']}, {row['run']}" + (f" ({row['remark']})" if "remark" in row else "")
        yield f"| {row['id']} | {run} | {figure} | {answer[kind] / 1024:.2f} | {deviation} | {judged} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose place, model or flags hold this text")
    parser.add_argument("--page", action="store_true", help="only write the page again, from the results there are")
    options = parser.parse_args(arguments)
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    if options.page:
        results = before
    else:
        rows = compare(options.only, before["rows"] if options.only else [])
        results = {**environment(CPU), "benchmark": "published.runs", "rows": rows}
        write_results(results, RESULTS)
    write_between(report(results), MARKS, PAGE)
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
