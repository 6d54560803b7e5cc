"""The campaign's rehearsal: every GPU benchmark at toy size, each cell in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmark_runs import environ_of_processes
from fake_cuda.device import is_loaded
from patience import HANG_S

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MEASURED_IN_STEPS = ("activations.offload", "teacher.offload", "operators.memory", "lgt.memory", "planning.estimate")


@pytest.mark.parametrize("part", ["1/24", pytest.param("1/1", marks=pytest.mark.slow)])
def test_every_cell_is_measured(tmp_path: Path, part: str) -> None:
    command = [sys.executable, "-m", "benchmarks.campaign", "--dry-run", f"--minutes={HANG_S / 60}", "--part", part]
    run = subprocess.run(
        [*command, "--output", str(tmp_path)],
        env=environ_of_processes(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    content = json.loads((tmp_path / "campaign.json").read_text())
    assert content["facts"]["hardware"]["device"] == "cuda"
    entries = content["entries"]
    failed = {title: entry["found"]["error"] for title, entry in entries.items() if "error" in entry["found"]}
    if is_loaded() and part == "1/1":  # no plan is made for a card that nobody knows
        assert failed.pop("lgt.memory: 2 x 1, planned").startswith("not run: 'Fake GPU 0' is none of the cards")
    assert failed == {}
    for title, entry in entries.items():
        if entry["benchmark"] in MEASURED_IN_STEPS and "error" not in entry["found"]:
            assert entry["found"]["step_ms"]["median"] > 0, title
            assert entry["found"]["reserved_bytes"] > 0, title
    probe = entries["campaign.probe: facts"]["found"]
    assert probe["return_codes"] == {"register": 0, "unregister": 0}
    assert probe["differing_gradients"]["deterministic"] == 0
    equal = [entry["found"].get("gradients_equal") for entry in entries.values()]
    assert False not in equal
