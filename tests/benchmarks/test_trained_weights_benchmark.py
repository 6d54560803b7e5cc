import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import Load, environ_of_processes
from deepspeed_builds import ADAM, DISK, built, needs_builds

from hf_memopt.units import GIB, MIB

DEEPSPEED = "DeepSpeed ZeRO-3, NVMe"


def results_of(tmp_path: Path, output: Path, kinds: list[str], **environ: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.limit.trained_weights", "--size=toy", "--runs=1", "--kinds", *kinds]
    command += [f"--folder={tmp_path / 'disk'}", f"--output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ_of_processes() | environ)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list((tmp_path / "disk").iterdir()) == []
    results: dict[str, Any] = json.loads(output.read_text())
    return results


def rows_of(results: dict[str, Any]) -> dict[tuple[str, bool], Any]:
    return {(row["kind"], row["is_limited"]): row for row in results["rows"]}


@pytest.mark.e2e
@pytest.mark.usefixtures("groups")
@pytest.mark.slow
def test_plain_is_killed_and_ours_ends_with_its_results(tmp_path: Path, output: Path, load: Load) -> None:
    results = results_of(tmp_path, output, ["all mapped", "ours, all", "ours, all, checkpointing"])
    picture = load("limit.picture").draw_trained(results, tmp_path / "picture.png")
    assert picture.stat().st_size > 10_000
    rows = rows_of(results)
    killed = rows.pop(("plain", True))
    assert killed["ends"] == ["killed"]
    assert killed["runs"][0]["reason"] == "out of memory"
    for row in rows.values():
        assert row["ends"] == ["finished"]
        assert row["are_equal"]
    plain, ours = (rows[kind, False]["runs"][0] for kind in ("plain", "ours, all"))
    num_bytes = ours["report"]["state_bytes"] / 2
    assert plain["peak_bytes"] - plain["rest_bytes"] > 4 * num_bytes
    assert ours["peak_bytes"] - ours["rest_bytes"] < num_bytes
    # Each update writes gradients of two micro-batches, weights and state, and reads weights for all of these.
    assert ours["written_bytes"] >= 3 * 5 * num_bytes
    assert ours["read_bytes"] >= 3 * 5 * num_bytes


@pytest.mark.e2e
@pytest.mark.usefixtures("groups")
@needs_builds
@pytest.mark.slow
def test_deepspeed_trains_nearly_as_plain_does(tmp_path: Path, output: Path) -> None:
    rows = rows_of(results_of(tmp_path, output, [DEEPSPEED], **built(ADAM, DISK)))
    plain, other = rows["plain", False]["runs"][0], rows[DEEPSPEED, False]["runs"][0]
    assert other["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert other["written_bytes"] > 0


def test_a_base_is_written_with_the_shapes_of_its_model(tmp_path: Path, load: Load) -> None:
    from transformers import LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 16}
    base = load("limit.trained_weights").write_base(sizes, tmp_path / "base")
    model, found = LlamaForCausalLM.from_pretrained(base, output_loading_info=True)
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, weight in model.named_parameters():
        assert weight.dtype is torch.float32
        assert weight.std().item() == pytest.approx(0.02, rel=0.2) if weight.dim() > 1 else weight.eq(1).all(), name


@pytest.mark.parametrize(
    "kind",
    [
        "all mapped",
        "all mapped, checkpointing",
        "ours, state",
        "ours, state and gradients",
        "ours, all",
        "ours, all, checkpointing",
    ],
)
@pytest.mark.sweep(share=0.4)
def test_a_kind_has_the_results_of_plain(kind: str, tmp_path: Path, load: Load) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 16}
    base = load("limit.trained_weights").write_base(sizes, tmp_path / "base")
    found = []
    for each in ("plain", kind):
        training = load("limit.trained_files").Training(str(base), 8, each, 2, str(tmp_path))
        losses = [training.step() for _ in range(2)]
        results = training.results()
        found.append((losses, results["weights_digest"], results["state_digest"]))
    assert found[0] == found[1]


def test_a_row_says_how_much_is_over_the_start(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    bench = load("limit.trained_weights")

    def row(kind: str, peak_mib: int) -> dict[str, Any]:
        run = {"peak_bytes": peak_mib * MIB, "rest_bytes": 100 * MIB}
        costs = {"cpu_s": 6.0, "wall_s": 3.0, "read_bytes": 3 * GIB, "written_bytes": 6 * GIB}
        ends = {"ends": ["finished"], "are_equal": True, "runs": [run]}
        return {"kind": kind, "is_limited": False, "peak_bytes": peak_mib * MIB, **costs, **ends}

    rows = [row("plain", 500), row("ours, all", 120)]
    limit = {"limit": "control group", "limit_bytes": 200 * MIB}
    bench.print_report({**limit, "num_runs": 1, "num_steps": 3, "rows": rows})
    plain, ours = capsys.readouterr().out.splitlines()[-2:]
    assert plain.split()[3:6] == ["500", "400", "100%"]
    assert ours.split()[4:7] == ["120", "20", "5%"]
