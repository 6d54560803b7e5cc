"""Tests of the built wheel: its files, and its use with only torch installed."""

import importlib.util
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import hf_memopt

ROOT = Path(__file__).parent.parent
PACKAGES = ("hf_memopt", "callbacks", "recipes")
DIST_INFO = f"hf_memopt-{hf_memopt.__version__}.dist-info"
METADATA_FILES = ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE")

# Libraries that the core must work without, whether they are installed or not.
HIDDEN = (
    "accelerate",
    "datasets",
    "diffusers",
    "huggingface_hub",
    "lerobot",
    "safetensors",
    "tokenizers",
    "transformers",
)

# Runs under `python -I -S`: no environment, no current folder, and no .pth file, so no editable install. The
# environment's folder comes last and without the hidden libraries.
BARE_ENVIRONMENT = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
sys.path[:] = [{installed!r}, *sys.path, {environment!r}]
"""

RunBare = Callable[[str], str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, since setuptools would take an earlier build's files in the checkout for sources."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in METADATA_FILES:
        shutil.copyfile(ROOT / file, source / file)
    # With the environment's setuptools: an isolated build would download one.
    _run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(output), str(source)])
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture(scope="module")
def run_bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> RunBare:
    """Run code with the wheel and torch installed, without the hidden libraries."""
    # A pure wheel without dependencies is installed by unpacking.
    installed = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    bare = BARE_ENVIRONMENT.format(
        hidden=HIDDEN, installed=str(installed), environment=str(Path(torch.origin).parent.parent)
    )
    return lambda code: _run([sys.executable, "-I", "-S", "-c", bare + textwrap.dedent(code)])


def test_hf_memopt_is_the_only_top_level_name(wheel_files: dict[str, str]) -> None:
    assert wheel_files[f"{DIST_INFO}/top_level.txt"] == "hf_memopt\n"
    assert {name.partition("/")[0] for name in wheel_files} == {"hf_memopt", DIST_INFO}


def test_every_source_file_is_in_the_wheel_and_no_test_is(wheel_files: dict[str, str]) -> None:
    expected = {
        _installed_name(file.relative_to(ROOT)) for folder in PACKAGES for file in (ROOT / folder).rglob("*.py")
    }
    modules = {name for name in wheel_files if name.endswith(".py")}
    assert modules == expected
    others = {"hf_memopt/py.typed", "hf_memopt/report/templates/page.html", "hf_memopt/report/templates/page.css"}
    assert others | {f"{DIST_INFO}/licenses/LICENSE"} <= set(wheel_files)


def test_core_works_where_only_torch_is_installed(run_bare: RunBare) -> None:
    output = run_bare(
        """
        import hf_memopt
        assert "torch" not in sys.modules
        import hf_memopt.activations, hf_memopt.memory, hf_memopt.reflow, hf_memopt.weights, hf_memopt.transfer
        import torch

        teacher = hf_memopt.OffloadedTeacher(torch.nn.Linear(2, 2), device="cpu", mode="swap")
        with teacher.onload() as module:
            assert module(torch.ones(1, 2)).shape == (1, 2)
        print(hf_memopt.__file__, *(name for name in sys.modules if "." not in name))
        """
    )
    file, *loaded = output.split()
    assert not file.startswith(str(ROOT))
    assert not set(HIDDEN) & set(loaded)


def test_hidden_libraries_are_hidden(run_bare: RunBare) -> None:
    with pytest.raises(AssertionError, match="ModuleNotFoundError: No module named 'lerobot'"):
        run_bare("import hf_memopt.lerobot")


def test_help_of_every_command_needs_no_torch(run_bare: RunBare) -> None:
    output = run_bare(
        """
        import importlib.metadata, re, io, contextlib

        (command,) = importlib.metadata.entry_points(group="console_scripts", name="hf-memopt")
        main = command.load()

        def help_of(*subcommand):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                try:
                    main([*subcommand, "--help"])
                except SystemExit as stop:
                    assert stop.code == 0
            return output.getvalue()

        for subcommand in re.findall(r"^    (\\S+)", help_of(), re.MULTILINE):
            assert help_of(subcommand).startswith(f"usage: hf-memopt {subcommand} ")
            print(subcommand)
        assert "torch" not in sys.modules
        """
    )
    assert {"prepare-student", "export", "doctor", "estimate", "plan"} <= set(output.split())


def _installed_name(file: Path) -> str:
    return (file if file.parts[0] == "hf_memopt" else Path("hf_memopt") / file).as_posix()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
