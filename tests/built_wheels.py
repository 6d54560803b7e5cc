"""Archives of the library and of its plug-in, built from copies of the checkout, and an environment with the wheels."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGIN = "lerobot_policy_smolvla_reflow"
LIBRARY = ("hf_memopt", "callbacks", "recipes", "tests")
METADATA = (
    *("setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in"),
    *("README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff"),
)
BUILT_BEFORE = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")


def copy_library(folder: Path) -> Path:
    """Copy what the library is built from, since setuptools would take an earlier build's files for sources."""
    for name in LIBRARY:
        shutil.copytree(ROOT / name, folder / name, ignore=BUILT_BEFORE)
    for name in METADATA:
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def copy_plugin(folder: Path) -> Path:
    return Path(shutil.copytree(ROOT / "plugins" / PLUGIN, folder / PLUGIN, ignore=BUILT_BEFORE))


def build(source: Path, output: Path, *kinds: str) -> list[Path]:
    """Return the archives; without kinds the wheel is built from the source archive, as `make wheel` does."""
    # With the environment's setuptools: an isolated build would download one.
    run([sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(output), str(source)])
    return sorted(output.iterdir())


class Environment:
    """A new environment with nothing but some wheels, and behind it the libraries of this one, without a clone."""

    def __init__(self, folder: Path, wheels: Sequence[Path]) -> None:
        run([sys.executable, "-m", "venv", str(folder)])
        self.python = folder / "bin" / "python"
        run([str(self.python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *map(str, wheels)])
        (self.packages,) = folder.glob("lib/python*/site-packages")
        # Folders named in a .pth file are searched, and .pth files in them, of editable installs, are not read.
        (self.packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def run(self, *words: str, cwd: Path) -> str:
        """Run a command of the environment, as if it were active, and return its output."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        path = os.pathsep.join([str(self.python.parent), variables["PATH"]])
        return run([str(self.python.parent / words[0]), *words[1:]], cwd=cwd, env=variables | {"PATH": path})


def run(command: list[str], **settings: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **settings)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout
