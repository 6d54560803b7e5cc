"""Packs wheels, the commit and a head script for tests and benchmarks on a GPU machine without a network.

    make gpu-bundle

The machine has Linux on x86-64, Python 3.12, torch, torchvision, accelerate and pytest. Copy the checkout
there with `.whl` and `.gpu`, and begin each command in it with the head script, which installs the wheels once:

    . .gpu/head.sh; python3 -m pytest -m gpu tests/gpu
"""

import argparse
import shutil
import subprocess
from pathlib import Path

from benchmarks.common import measured_commit

ROOT = Path(__file__).parent.parent
WHEELS, HEAD = ".whl", ".gpu"  # folders
MAX_BYTES = 60 * 2**20  # of both

# Imports of benchmarks and GPU tests beside the packages above, in the versions of constraints.txt.
PACKAGES = (
    "configmypy",
    "datasets",
    "diffusers",
    "dill",
    "draccus",
    "expecttest",
    "farama-notifications",
    "gymnasium",
    "huggingface-hub",
    "importlib-metadata",
    "jsonlines",
    "lerobot",
    "lpips",
    "mergedeep",
    "multiprocess",
    "neuraloperator",
    "num2words",
    "peft",
    "ruamel-yaml",
    "tensorly",
    "tensorly-torch",
    "termcolor",
    "tokenizers",
    "toml",
    "torchao",
    "transformers",
    "trl",
    "zencfg",
)
# Newest first; pip matches each by its exact name.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")

# lerobot's policies import its datasets, which import PyAV (40 MB). No benchmark reads a video, so a stub will do.
AV = '''"""Replaces PyAV where no video is read."""

import sys
from unittest.mock import MagicMock

__version__ = "{version}"
for name in ("audio", "codec", "container", "error", "filter", "logging", "video", "video.frame", "video.plane"):
    sys.modules[f"av.{{name}}"] = MagicMock()


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
'''
AV_METADATA = "Metadata-Version: 2.1\nName: av\nVersion: {version}\n"

HEAD_SCRIPT = """\
# Begins each command on the GPU machine, in the root of the checkout: makes hf_memopt and the wheels importable.
set -o pipefail
unset PYTHONDONTWRITEBYTECODE  # the second import of everything takes half as long
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
export HF_MEMOPT_COMMIT="$(cat .gpu/commit)"
site="${HF_MEMOPT_SITE:-/tmp/hf_memopt_site}"
if [ ! -d "$site/av" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl &&
    cp -r .gpu/site/* "$site/" || exit
fi
# As setup.cfg does it: both packages lie beside hf_memopt and are imported from it.
ln -sfn ../callbacks hf_memopt/callbacks
ln -sfn ../recipes hf_memopt/recipes
export PYTHONPATH="$site:$PWD"
"""


def pinned(constraints: str) -> dict[str, str]:
    versions = dict(line.split("==") for line in constraints.splitlines() if "==" in line)
    missing = [package for package in (*PACKAGES, "av") if package not in versions]
    if missing:
        raise ValueError(f"constraints.txt has no version of {', '.join(missing)}; add it there")
    return {package: versions[package] for package in (*PACKAGES, "av")}


def download(requirements: list[str], folder: Path, pip: list[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [f"--platform={name}" for name in PLATFORMS]
    target = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms]
    subprocess.run([*pip, "download", "-q", "--no-deps", *target, "-d", str(folder), *requirements], check=True)


def write_head(folder: Path, commit: str | None, av_version: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    package, metadata = folder / "site" / "av", folder / "site" / f"av-{av_version}.dist-info"
    for new in (package, metadata):
        new.mkdir(parents=True)
    (package / "__init__.py").write_text(AV.format(version=av_version))
    (metadata / "METADATA").write_text(AV_METADATA.format(version=av_version))
    (folder / "head.sh").write_text(HEAD_SCRIPT)
    (folder / "commit").write_text(f"{commit or 'unknown'}\n")


def num_bytes(*folders: Path) -> int:
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pip", nargs="+", default=["pip"], help="the command that runs pip (default: pip)")
    options = parser.parse_args(arguments)
    wheels, head = ROOT / WHEELS, ROOT / HEAD
    versions = pinned((ROOT / "constraints.txt").read_text())
    download([f"{package}=={versions[package]}" for package in PACKAGES], wheels, options.pip)
    write_head(head, measured_commit(), versions["av"])
    size = num_bytes(wheels, head)
    if size > MAX_BYTES:
        raise SystemExit(f"{WHEELS} and {HEAD} take {size / 2**20:.1f} MiB, more than {MAX_BYTES / 2**20:.0f}")
    print(f"{WHEELS} and {HEAD}: {size / 2**20:.1f} MiB. On the GPU machine begin each command with: . {HEAD}/head.sh;")


if __name__ == "__main__":
    main()
