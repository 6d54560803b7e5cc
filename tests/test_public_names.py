"""Tests that modules list their public names in `__all__`, and that users are shown no other names."""

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from structure import ROOT, imported, modules

import hf_memopt

# Modules without a package of their own; all others with public names are packages.
SINGLE = {
    "hf_memopt.reflow",
    "hf_memopt.integrations.lightning",
}
# A dotted name in a text, unless a command runs it: `python -m hf_memopt.cli`, `--flag=hf_memopt.lerobot`.
NAMED = re.compile(r"(?<![\w./=-])(?<!-m )hf_memopt(?:\.\w+)+")


def _listed(name: str, file: Path) -> list[str]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            try:
                return [*ast.literal_eval(node.value)]
            except ValueError:  # computed: names that are imported when they are used
                return [*importlib.import_module(name).__all__]
    raise AssertionError(f"{file} assigns __all__ below its top level")


def public_names() -> dict[str, list[str]]:
    """Return by module the listed names."""
    return {name: _listed(name, file) for name, file in modules().items() if "\n__all__ = " in file.read_text()}


PUBLIC = public_names()
PATHS = {*PUBLIC, *(f"{module}.{name}" for module, names in PUBLIC.items() for name in names)}
LIBRARY = {module for module in PUBLIC if ".recipes." not in module}


def test_public_names_are_found_where_they_live() -> None:
    for name in hf_memopt.__all__:
        assert name in dir(hf_memopt)
        assert getattr(hf_memopt, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        _ = hf_memopt.Missing


def test_public_are_packages_and_a_few_modules() -> None:
    packages = {name for name, file in modules().items() if file.stem == "__init__"}
    assert LIBRARY - packages == SINGLE


def test_every_name_of_the_library_is_one_of_a_package() -> None:
    of_packages = {name for module in LIBRARY - {"hf_memopt"} for name in PUBLIC[module]}
    assert {*hf_memopt.__all__} - {"__version__", "reflow"} <= of_packages


def test_the_page_of_the_api_lists_exactly_these() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    entries = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert len(entries) == len({*entries})
    # Modules that are listed as a whole stand for their names.
    shown = {path for entry in entries for path in ([f"{entry}.{name}" for name in PUBLIC.get(entry, [])] or [entry])}
    names = {f"{module}.{name}" for module in LIBRARY - {"hf_memopt"} for name in PUBLIC[module]}
    assert shown == names


@pytest.mark.parametrize("page", ["README.md", "docs", "docs/notebooks", "recipes/by_feature", "plugins"])
def test_users_are_shown_imports_of_public_names_alone(page: str) -> None:
    found = [(place, path) for place, code in _code(ROOT / page) for path in _imports(code)]
    assert found
    assert [(place, path) for place, path in found if path not in PATHS] == []


def test_users_are_told_of_public_names_alone() -> None:
    """Check pages, and all sentences of the code: docstrings, messages, help."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [(file.name, file.read_text()) for file in pages if file.name not in ("LOG.md", "decisions.md")]
    texts += [(name, text) for name, file in modules().items() for text in _sentences(file)]
    found = [(place, path) for place, text in texts for path in NAMED.findall(text)]
    assert len(found) > 50
    assert [(place, path) for place, path in found if path not in PATHS] == []


@pytest.mark.parametrize(
    ("code", "path"),
    [
        ("from hf_memopt.memory.logger import phase_table", "hf_memopt.memory.logger.phase_table"),
        ("def f():\n    import hf_memopt.units", "hf_memopt.units"),
        ("from hf_memopt import units", "hf_memopt.units"),
    ],
)
def test_a_private_import_is_found(code: str, path: str) -> None:
    assert _imports(code) == [path]
    assert path not in PATHS


def test_a_private_name_in_a_sentence_is_found() -> None:
    assert NAMED.findall("pass hf_memopt.units.GIB, or run python -m hf_memopt.cli") == ["hf_memopt.units.GIB"]
    assert "hf_memopt.units.GIB" not in PATHS


def _code(page: Path) -> Iterator[tuple[str, str]]:
    """Yield Python code of a page, or of a folder's pages and scripts."""
    for file in [page] if page.is_file() else sorted(page.rglob("*.py") if page.stem != "docs" else page.glob("*.md")):
        text = file.read_text()
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        yield from ((file.name, block) for block in (blocks if file.suffix == ".md" else [text]))
    for file in page.glob("*.ipynb"):
        cells = json.loads(file.read_text())["cells"]
        yield from ((file.name, "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code")


def _imports(code: str) -> list[str]:
    return [path for path in imported(ast.parse(code)) if path.partition(".")[0] == "hf_memopt"]


def _sentences(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
