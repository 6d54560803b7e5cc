"""The bundle for a GPU machine without a network: pinned wheels, a head script, the commit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_runs import BENCHMARKS, Load

ROOT = BENCHMARKS.parent


def test_every_package_has_the_version_of_the_constraints(load: Load) -> None:
    bundle, constraints = load("gpu_bundle"), (ROOT / "constraints.txt").read_text()
    found = bundle.pinned(constraints)
    assert len(found) == len(bundle.PACKAGES) + 1  # and PyAV
    assert {f"{package}=={version}" for package, version in found.items()} <= set(constraints.splitlines())
    with pytest.raises(ValueError, match=r"no version of .*lerobot.*add it there"):
        bundle.pinned("")


def test_wheels_are_those_of_the_gpu_machine(load: Load, tmp_path: Path) -> None:
    said = tmp_path / "said"
    pip = [sys.executable, "-c", f"import json, sys; json.dump(sys.argv[1:], open({str(said)!r}, 'w'))"]
    load("gpu_bundle").download(["dill==0.4.1"], tmp_path / ".whl", pip)
    arguments = json.loads(said.read_text())
    assert arguments[0] == "download"
    assert {"--no-deps", "--only-binary=:all:", "--python-version=3.12", "dill==0.4.1"} <= set(arguments)


def test_the_head_script_makes_the_checkout_importable(load: Load, tmp_path: Path) -> None:
    """Let pip install nothing, so that the script itself has to bring the imported modules."""
    load("gpu_bundle").write_head(tmp_path / ".gpu", "0123abcd", "15.1.0")
    for package in ("hf_memopt", "callbacks", "recipes"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "python3").chmod(0o755)
    site = tmp_path / "site"
    site.mkdir()
    program = (
        "import os, av, hf_memopt.callbacks, hf_memopt.recipes; print(os.getenv('HF_MEMOPT_COMMIT'), av.__version__)"
    )
    command = f'PATH="$PWD:$PATH"; . .gpu/head.sh; "{sys.executable}" -S -c "{program}"'
    environment = {"PATH": "/usr/bin:/bin", "HF_MEMOPT_SITE": str(site)}
    run = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stdout == "0123abcd 15.1.0\n", run.stderr


def test_results_name_the_commit_that_travelled(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MEMOPT_COMMIT", "0123abcd")
    assert load("common").measured_commit() == "0123abcd"
