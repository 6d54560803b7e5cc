"""Tests of the built archives: their files, and the wheels' use from an empty folder and with only torch installed."""

import importlib.util
import json
import re
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from built_wheels import LIBRARY, METADATA, PLUGIN, Environment, build, copy_library, copy_plugin, run
from packaging.metadata import Metadata
from tiny_configs import TINY_LLAMA

import hf_memopt

ROOT = Path(__file__).parent.parent
PACKAGES = ("hf_memopt", "callbacks", "recipes")
DIST_INFO = f"hf_memopt-{hf_memopt.__version__}.dist-info"

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

USERS_SCRIPT = """
from hf_memopt import ActivationOffloader
from hf_memopt.callbacks import MemoptArguments
from hf_memopt.recipes.lgt.workload import workload

reveal_type(ActivationOffloader(budget_gib=1.0).stats)
reveal_type(MemoptArguments().budget_gib)
reveal_type(workload("lgt.json"))
"""
RunBare = Callable[[str], str]


@pytest.fixture(scope="module")
def wheel_files(archives: dict[str, Path]) -> dict[str, str]:
    return contents(archives["hf_memopt.whl"])


def contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture(scope="module")
def run_bare(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RunBare:
    """Run code with the wheel and torch installed, without the hidden libraries."""
    # A pure wheel without dependencies is installed by unpacking.
    installed = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(archives["hf_memopt.whl"]) as archive:
        archive.extractall(installed)
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    bare = BARE_ENVIRONMENT.format(
        hidden=HIDDEN, installed=str(installed), environment=str(Path(torch.origin).parent.parent)
    )
    return lambda code: run([sys.executable, "-I", "-S", "-c", bare + textwrap.dedent(code)])


def test_hf_memopt_is_the_only_top_level_name(wheel_files: dict[str, str]) -> None:
    assert wheel_files[f"{DIST_INFO}/top_level.txt"] == "hf_memopt\n"
    assert {name.partition("/")[0] for name in wheel_files} == {"hf_memopt", DIST_INFO}


def test_every_source_file_is_in_the_wheel_and_no_test_is(wheel_files: dict[str, str]) -> None:
    expected = {
        _installed_name(file.relative_to(ROOT)) for folder in PACKAGES for file in (ROOT / folder).rglob("*.py")
    }
    modules = {name for name in wheel_files if name.endswith(".py")}
    assert modules == expected
    configs = {_installed_name(file.relative_to(ROOT)) for file in (ROOT / "recipes/configs").rglob("*.*")}
    templates = {_installed_name(file.relative_to(ROOT)) for file in (ROOT / "hf_memopt/report/templates").iterdir()}
    others = {name for name in wheel_files if name.startswith("hf_memopt/")} - modules
    assert others == {"hf_memopt/py.typed"} | configs | templates
    assert f"{DIST_INFO}/licenses/LICENSE" in wheel_files


def test_the_wheels_are_those_that_the_checkout_gives_directly(
    archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name, copy in {"hf_memopt": copy_library, PLUGIN: copy_plugin}.items():
        source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("direct")
        (direct,) = build(copy(source), output, "--wheel")
        assert direct.name == archives[f"{name}.whl"].name
        assert contents(direct) == contents(archives[f"{name}.whl"])


def test_the_source_archive_has_the_library_and_its_tests(archives: dict[str, Path]) -> None:
    with tarfile.open(archives["hf_memopt.tar.gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    copied = {file for folder in LIBRARY for file in (ROOT / folder).rglob("*") if file.is_file()}
    kept = {str(file.relative_to(ROOT)) for file in copied if not {"__pycache__", ".pytest_cache"} & set(file.parts)}
    made = {name for name in names if name.startswith("hf_memopt.egg-info/")} | {"PKG-INFO"}
    assert names - made == kept | set(METADATA)


@pytest.mark.parametrize("name", ["hf_memopt", PLUGIN])
def test_the_index_would_take_the_metadata(name: str, archives: dict[str, Path]) -> None:
    files = contents(archives[f"{name}.whl"])
    (text,) = (text for path, text in files.items() if path.endswith(".dist-info/METADATA"))
    metadata = Metadata.from_email(text, validate=True)
    assert str(metadata.version) == hf_memopt.__version__
    assert metadata.description_content_type == "text/markdown"
    assert "Typing :: Typed" in metadata.classifiers
    assert f"{name}/py.typed" in files


def test_an_address_of_the_repository_is_in_the_metadata(tmp_path: Path) -> None:
    source = copy_library(tmp_path / "source")
    settings = (source / "setup.cfg").read_text()
    (source / "setup.cfg").write_text(
        re.sub(r"^repository_url =.*$", "repository_url = https://example.org/memopt", settings, flags=re.MULTILINE)
    )
    (wheel,) = build(source, tmp_path / "dist", "--wheel")
    metadata = contents(wheel)[f"{DIST_INFO}/METADATA"]
    assert "Project-URL: Repository, https://example.org/memopt\n" in metadata


@pytest.mark.e2e
def test_both_wheels_work_where_no_clone_is(installed: Environment, tmp_path: Path) -> None:
    assert installed.run("hf-memopt", "--version", cwd=tmp_path) == f"hf_memopt {hf_memopt.__version__}\n"
    found = "import hf_memopt, PLUGIN as plugin; print(hf_memopt.__file__); print(plugin.SmolVLAReflowConfig.__name__)"
    file, name = installed.run("python", "-c", found.replace("PLUGIN", PLUGIN), cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(installed.packages)
    assert name == "SmolVLAReflowConfig"


@pytest.mark.e2e
def test_commands_work_where_no_clone_is(installed: Environment, tmp_path: Path) -> None:
    machine = json.loads(installed.run("hf-memopt", "doctor", "--json", cwd=tmp_path))
    assert {"devices", "host", "versions"} <= set(machine)
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    estimate = installed.run("hf-memopt", "estimate", "config.json", "--seq-len", "64", "--gpu", "8GiB", cwd=tmp_path)
    assert "\nIt fits on 8GiB" in estimate
    folder = Path(installed.run("hf-memopt", "configs", cwd=tmp_path).strip())
    assert folder.is_relative_to(installed.packages)
    assert (folder / "accelerate" / "ddp.yaml").is_file()


@pytest.mark.e2e
def test_a_recipe_finds_its_configuration_where_no_clone_is(installed: Environment, tmp_path: Path) -> None:
    job = ("--recipe", "train_sft", "--config", "recipes/configs/sft_demo.yaml")
    assert "\nIt fits on 8GiB" in installed.run("hf-memopt", "estimate", *job, "--gpu", "8GiB", cwd=tmp_path)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_users_mypy_sees_our_types(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USERS_SCRIPT)
    # Reading these libraries takes a minute and a half.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,transformers.*,accelerate.*]\nfollow_imports = skip\n")
    settings = ["--strict", "--python-executable", str(installed.python), "--cache-dir", str(tmp_path / "cache")]
    shown = run([sys.executable, "-m", "mypy", *settings, "user.py"], cwd=tmp_path)
    assert re.findall(r'Revealed type is "(.*)"', shown) == [
        "hf_memopt.activations.stats.OffloadStats",
        "float | None",
        "hf_memopt.recipes.lgt.workload.LatentTransferWorkload",
    ]


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
