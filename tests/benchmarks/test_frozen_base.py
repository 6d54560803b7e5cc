import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import Load, environ_of_processes

from hf_memopt.units import GIB, MIB


@pytest.mark.slow  # near its limit a process may be slow for minutes before it is killed
@pytest.mark.usefixtures("groups")
def test_plain_is_killed_and_ours_ends_with_its_adapters(tmp_path: Path, output: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.limit.frozen_base", "--size=toy", "--runs=1", "--steps=3"]
    command += ["--kinds", "in memory", "mapped", "ours", "ours, checkpointing, budget"]
    command += [f"--folder={tmp_path / 'disk'}", f"--output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ_of_processes())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(output.read_text())
    rows = {row["kind"]: row for row in results["rows"]}
    free, killed = rows.pop("in memory, no limit"), rows.pop("in memory")
    assert killed["ends"] == ["killed"]
    assert killed["runs"][0]["reason"] == "out of memory"
    for row in rows.values():
        assert row["ends"] == ["finished"]
        assert row["adapters_equal"]
    limit = results["sizes"]["limit_gib"] * GIB
    assert free["peak_bytes"] > limit
    ours = rows["ours"]
    assert ours["peak_bytes"] < free["peak_bytes"] - 0.8 * results["base_bytes"]
    (run,) = ours["runs"]
    # Every weight once in forward and once in backward, but the embedding's table, of which rows are looked up.
    assert 1.9 * results["base_bytes"] < ours["read_bytes"] < 2.0 * results["base_bytes"]
    assert run["report"]["peak_device_bytes"] < 32 * MIB
    (run,) = rows["ours, checkpointing, budget"]["runs"]
    assert run["report"]["resident"]["within the budget"] > 64 * MIB
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_row_says_how_a_kind_ended(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    bench = load("limit.frozen_base")

    def run(end: str, digest: str = "a") -> dict[str, Any]:
        costs = {
            "losses": [1.0, 0.5, 0.25],
            "cpu_s_until": [5.0, 6.0, 8.0],
            "s_until": [9.0, 10.0, 12.0],
            "read_bytes_until": [GIB, GIB, 2 * GIB],
            "adapters_digest": digest,
        }
        missing = dict.fromkeys(costs) | {"losses": [1.0]}
        return {"end": end, "peak_bytes": 3 * MIB, **(costs if end == "finished" else missing)}

    reference = run("finished")
    rows = [
        bench.summary("in memory, no limit", [reference], reference),
        bench.summary("in memory", [run("killed")], reference),
        bench.summary("ours", [run("finished"), run("finished", "b")], reference),
    ]
    sizes = {"limit_gib": 2, "num_tokens": 256, "budget_gib": 1}
    bench.print_report({"base_bytes": 3 * GIB, "sizes": sizes, "rows": rows})
    title, _, _, free, killed, ours = capsys.readouterr().out.splitlines()
    assert title == "LoRA of a base of 3.00 GiB in 2 GiB, 256 tokens a step, budget 1 GiB: one run"
    assert free.split()[-7:] == ["finished", "3", "1.5", "1.5", "0.50", "9.0", "equal"]
    assert killed.split()[-9:] == ["in", "step", "2", "3", "-", "-", "-", "-", "-"]
    assert ours.split()[-1] == "DIFFER"
