import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import Load, environ_of_processes

from hf_memopt.units import GIB, MIB


@pytest.mark.e2e
@pytest.mark.usefixtures("groups")
@pytest.mark.slow
def test_plain_is_killed_and_ours_ends_with_its_results(tmp_path: Path, output: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.limit.optimizer_state", "--size=toy", "--runs=1"]
    command += ["--kinds", "ours, file", "SGD, no state"]
    command += [f"--folder={tmp_path / 'disk'}", f"--output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ_of_processes())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = {(row["kind"], row["is_limited"]): row for row in json.loads(output.read_text())["rows"]}
    killed, free = rows["plain", True], rows["ours, file", False]
    assert killed["ends"] == ["killed"]
    assert killed["runs"][0]["reason"] == "out of memory"
    for row in (free, rows["ours, file", True]):
        assert row["ends"] == ["finished"]
        assert row["are_equal"]
    (run,) = free["runs"]
    state_bytes = run["report"]["state_bytes"]
    # Each update writes the state, and all but the first read it before.
    assert run["report"]["bytes_written"] == 3 * state_bytes <= free["written_bytes"]
    assert run["report"]["bytes_read"] == 2 * state_bytes <= free["read_bytes"]
    largest_bytes = 2 * 4 * 2000 * 512
    assert run["report"]["peak_bytes"] <= 2 * largest_bytes
    # The optimizer's temporaries, and memory of libraries, come on top.
    assert free["peak_bytes"] - rows["SGD, no state", False]["peak_bytes"] < 2 * largest_bytes + state_bytes / 4
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_row_says_how_a_kind_ended(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    bench = load("limit.optimizer_state")

    def run(end: str = "finished", digest: str = "a", peak_bytes: int = 3 * MIB) -> dict[str, Any]:
        costs = {"cpu_s": 6.0, "wall_s": 3.0, "read_bytes": 3 * GIB, "written_bytes": 6 * GIB}
        results = {"losses": [1.0, 0.5, 0.25], "weights_digest": "w", "state_digest": digest}
        missing = dict.fromkeys((*costs, *results)) | {"losses": [1.0]}
        return {"end": end, "peak_bytes": peak_bytes, **(costs | results if end == "finished" else missing)}

    reference = run()
    rows = [
        bench.summary("plain", False, [reference], reference),
        bench.summary("SGD, no state", False, [run(digest="b", peak_bytes=MIB)], reference),
        bench.summary("plain", True, [run("killed")], reference),
        bench.summary("ours, file", True, [run(), run(digest="b")], reference),
    ]
    bench.print_report({"limit": "control group", "limit_bytes": 2 * MIB, "num_runs": 1, "num_steps": 3, "rows": rows})
    title, _, _, free, no_state, killed, ours = capsys.readouterr().out.splitlines()
    assert title == "medians of 1 runs of 3 updates; the limit is 2 MiB (control group)"
    costs = ["2.00", "1.00", "1.00", "1.00", "2.00"]
    assert free.split() == ["plain", "no", "finished", "3", "2", *costs, "equal"]
    assert no_state.split()[-9:] == ["finished", "1", "0", *costs, "-"]
    assert killed.split() == ["plain", "yes", "killed", "in", "update", "2", "3", "2", "-", "-", "-", "-", "-", "-"]
    assert ours.split()[-1] == "DIFFER"
