import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import Load, environ_of_processes


@pytest.mark.e2e
@pytest.mark.usefixtures("groups")
@pytest.mark.slow
def test_plain_is_killed_and_ours_ends_with_its_weights(tmp_path: Path, output: Path, load: Load) -> None:
    kinds = ["plain", "plain, weights mapped", "ours, all"]
    sizes = ["--size=toy", "--runs=1", "--steps=2", "--allocators", "mapped", "--workloads", "language model"]
    command = [sys.executable, "-m", "benchmarks.limit.under_a_limit", *sizes, f"--folder={tmp_path / 'disk'}"]
    command += [f"--output={output}", "--kinds", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ_of_processes())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(output.read_text())
    free, plain, mapped, ours = results["workloads"]["language model"]["rows"]
    assert [row["ends"] for row in (free, plain, ours)] == [["finished"], ["killed"], ["finished"]]
    assert mapped["ends"] in (["killed"], ["too slow"])  # as the system ends a process, or reads its files for ever
    assert plain["reasons"] == ["out of memory"]
    assert ours["weights_equal"]
    assert ours["losses_equal"]
    assert ours["written_bytes"] > 0
    assert list((tmp_path / "disk").iterdir()) == []
    picture = load("limit.picture").draw(results["workloads"]["language model"], 2, tmp_path / "picture.png")
    assert picture.stat().st_size > 10_000


@pytest.mark.e2e
def test_mapped_weights_are_the_same_weights(tmp_path: Path, load: Load) -> None:
    workload = load("limit.workloads").make_workload(
        "neural operator", is_toy=True
    )  # some of whose weights are complex
    before = {name: weight.detach().clone() for name, weight in workload.model.named_parameters()}
    load("limit.kinds").mapped_weights(workload, tmp_path, 0.0)
    for name, weight in workload.model.named_parameters():
        assert torch.equal(weight, before[name])
        assert not weight.untyped_storage().resizable()
    assert list(tmp_path.iterdir()) == []


def test_a_row_says_how_a_kind_ended(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    bench = load("limit.under_a_limit")

    def run(end: str, **entries: Any) -> dict[str, Any]:
        costs = {
            "cpu_s": 4.0,
            "wall_s": 2.0,
            "written_bytes": 2**30,
            "stats": {"measured_peak_gib": 0.25},
            "weights_digest": "a",
            "losses": [1.0, 0.5],
            "cpu_s_until": [3.0, 4.0],
        }
        missing = dict.fromkeys(costs) | {"losses": [1.0], "cpu_s_until": [3.0]}
        sizes = {"end": end, "reason": None, "peak_bytes": 2**20, "rest_bytes": 2**19}
        return {**sizes, **(costs if end == "finished" else missing), **entries}

    free = bench.summary(bench.NO_LIMIT, "mapped", [run("finished")], run("finished"))
    killed = bench.summary("plain", "mapped", [run("killed"), run("finished")], run("finished"))
    other = bench.summary(
        "ours, all", "mapped", [run("finished", weights_digest="b", cpu_s=6.0, cpu_s_until=[3.0, 6.0])], run("finished")
    )
    cells = [bench._named_cells(row, 2, [free, killed, other]) for row in (free, killed, other)]
    assert cells[1]["end"] == "finished or killed in step 2"
    assert cells[2]["end"] == "finished"
    assert [row["of plain"] for row in cells] == ["1.00", "1.00", "1.50"]
    assert [row["later"] for row in cells] == ["1.00", "1.00", "3.00"]
    assert cells[0]["saved"] == "256"
    assert [row["weights"] for row in cells] == ["equal", "equal", "DIFFER"]
    facts = {"limit": "control group", "rest_bytes": 2**20, "allowance_bytes": 2**21, "budget_bytes": 2**20}
    workloads = {"language model": {**facts, "rows": [free, killed, other]}}
    bench.print_report({"num_runs": 2, "num_steps": 2, "workloads": workloads})
    assert "language model: 1 MiB at rest, 2 more allowed (control group), budget 1\n" in capsys.readouterr().out
