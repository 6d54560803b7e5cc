"""Runs of all benchmarks: results, failures, time limits, the deadline, and continued calls."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmark_runs import Load
from patience import HANG_S

WRITES = "import sys; open(sys.argv[1] + '/results.json', 'w').write('{\"cells\": [{}, {\"error\": \"no\"}]}')"
FAILS = "raise SystemExit('broken')"
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def run_all(load: Load, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load the module, without its slow facts about the machine."""
    module = load("run_all")
    monkeypatch.setattr(module, "facts", lambda folder: {"commit": "abc", "date": "2026-11-26"})
    return module


@pytest.fixture
def job(run_all: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(name: str, program: str, minutes: float = 5) -> Any:
        (tmp_path / "programs").mkdir(exist_ok=True)
        (tmp_path / "programs" / f"program_{name}.py").write_text(program)
        return run_all.Job(name, minutes, f"program_{name} {{folder}}")

    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "programs"))
    return make


def run(run_all: Any, folder: Path, jobs: list[Any], minutes: float = 60, *, overwrite: bool = False) -> dict[str, str]:
    settings = {"output": folder / "out", "minutes": minutes, "overwrite": overwrite, "dry_run": False}
    rows = run_all.run(argparse.Namespace(**settings, estimates=None, jobs=jobs), time.time())
    return {name: outcome for name, outcome, _ in rows}


def test_results_have_the_facts_of_the_run(
    run_all: Any, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = "done, 1 of 2 measurements without figures"
    assert run(run_all, tmp_path, [job("writes", WRITES)]) == {"writes": outcome}
    found = json.loads((tmp_path / "out" / "writes.json").read_text())
    assert found.pop("run").items() >= {"name": "writes", "outcome": outcome}.items()
    assert found == {"commit": "abc", "date": "2026-11-26", "cells": [{}, {"error": "no"}]}
    assert f"s  writes: {outcome}" in capsys.readouterr().out


def test_a_later_call_runs_only_jobs_without_results(run_all: Any, job: Any, tmp_path: Path) -> None:
    first, second = job("first", FAILS), job("second", WRITES)
    assert run(run_all, tmp_path, [first]) == {"first": "failed: exit status 1"}
    (tmp_path / "programs" / "program_first.py").write_text(WRITES)
    outcomes = run(run_all, tmp_path, [first, second])
    assert outcomes["first"] == "failed: exit status 1, in an earlier call"
    assert outcomes["second"].startswith("done")
    assert run(run_all, tmp_path, [first], overwrite=True)["first"].startswith("done")


def test_a_job_whose_limit_is_not_left_does_not_begin(run_all: Any, job: Any, tmp_path: Path) -> None:
    long, short = job("long", FAILS, minutes=20), job("short", WRITES, minutes=1)
    outcomes = run(run_all, tmp_path, [long, short], minutes=10)
    assert outcomes["long"] == "not begun: needs 20 min"
    assert outcomes["short"].startswith("done")
    assert not (tmp_path / "out" / "long.json").exists()


def test_a_job_that_takes_too_long_is_ended_with_its_children(
    run_all: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, wait = tmp_path / "out" / "logs" / "hangs.txt", subprocess.Popen.wait

    def expire(process: Any, timeout: float | None = None) -> int:
        """Let the limit pass once the child is there."""
        if timeout is None:
            return wait(process)
        begun = time.monotonic()
        while not log.read_text().strip():
            assert time.monotonic() - begun < HANG_S
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("program", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", expire)
    assert run(run_all, tmp_path, [job("hangs", HANGS, minutes=7)]) == {"hangs": "failed: took over 7 min"}
    begun = time.monotonic()
    while is_running(int(log.read_text())):  # it dies a moment after the signal
        assert time.monotonic() - begun < HANG_S
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("program", "status"), [(WRITES, 0), (FAILS, 1)])
def test_the_exit_status_tells_of_a_failure(
    run_all: Any,
    job: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    status: int,
) -> None:
    toy = run_all.Job("toy", 5, None, job("toy", program).real)
    monkeypatch.setattr(run_all, "JOBS", (toy, job("real", FAILS)))
    assert run_all.main(["--dry-run", "--output", str(tmp_path / "out")]) == status
    printed = capsys.readouterr().out
    assert ("broken" in printed) == (program == FAILS)
    assert "real" not in printed.partition("job ")[2].partition("results in")[0]


def test_every_job_has_a_command_and_a_name_of_its_own(run_all: Any, tmp_path: Path) -> None:
    assert len({job.name for job in run_all.JOBS}) == len(run_all.JOBS)
    for toy in (False, True):
        for job in run_all.JOBS:
            if (job.toy if toy else job.real) is not None:
                command = job.command(tmp_path, toy=toy, estimates=None)
                assert command[:2] == [sys.executable, "-m"]
                assert "{folder}" not in " ".join(command)


def test_a_job_that_does_not_exist_is_named(run_all: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_all.parse(["--only", "probe", "nothing"])
    assert "--only nothing: there is no such job; choose from probe, tests, " in capsys.readouterr().err
