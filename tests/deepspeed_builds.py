"""Builds of DeepSpeed's C++ into a cache folder, by the machine's compiler."""

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ADAM, DISK = "CPUAdamBuilder", "AsyncIOBuilder"
LIBAIO = Path(__file__).with_name("libaio")

needs_builds = pytest.mark.skipif(
    find_spec("deepspeed") is None or not (shutil.which("g++") and shutil.which("ninja")),
    reason="needs DeepSpeed, g++ and ninja",
)


def built(*builders: str) -> dict[str, str]:
    """Return the environment of processes that use these builds: Adam's takes 1.5 minutes, the disk's five."""
    folder = _cache() / _key()
    folder.mkdir(parents=True, exist_ok=True)
    places = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder)}
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first process builds, the others wait
        if DISK in builders:
            places |= _libaio(folder / "libaio")
        for builder in builders:
            if not (ready := folder / f"{builder}.ready").is_file():
                load = f"from deepspeed.ops.op_builder import {builder}; {builder}().load()"
                subprocess.run([sys.executable, "-c", load], env=os.environ | places, check=True, capture_output=True)
                ready.touch()
    return places


def _libaio(folder: Path) -> dict[str, str]:
    """Make our stand-in for libaio known to compilers; DeepSpeed's probe links a function of that name."""
    folder.mkdir(exist_ok=True)
    probed = "int io_submit(void) { return -1; }"
    subprocess.run(["g++", "-x", "c", "-c", "-", "-o", folder / "probed.o"], input=probed, text=True, check=True)
    subprocess.run(["ar", "rcs", folder / "libaio.a", folder / "probed.o"], check=True)
    return {"CPATH": str(LIBAIO), "LIBRARY_PATH": str(folder)}


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_memopt" / "deepspeed"


def _key() -> str:
    parts = importlib.metadata.version("deepspeed"), torch.__version__, torch.__path__, sys.version
    return hashlib.sha256(str(parts).encode()).hexdigest()[:16]
