import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_runs import environ_of_processes

from hf_memopt.units import MIB

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a single process"),
]


def test_plain_training_dies_and_the_same_training_runs_through(tmp_path: Path) -> None:
    demo = [sys.executable, "-m", "benchmarks.limit.demo", f"--output={tmp_path / 'demo'}", "--steps=3"]
    done = subprocess.run(demo, env=environ_of_processes(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    free, plain, fit = results["runs"].values()
    assert (free["end"], fit["end"]) == ("finished", "finished")
    assert plain["end"] in ("killed", "stopped")
    assert len(plain["losses"]) < 3
    assert fit["losses"] == free["losses"]
    assert fit["weights_digest"] == free["weights_digest"]
    assert fit["peak_bytes"] < 1.05 * results["limit_bytes"] + 20 * MIB < free["peak_bytes"]
    assert "All losses equal: True. All weights equal, bit for bit: True." in done.stdout
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "logs",
        "memory_and_loss.png",
        "results.json",
    ]
