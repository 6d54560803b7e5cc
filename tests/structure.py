"""Measures the structure of the code: `python tests/structure.py` prints the figures that docs/decisions.md compares.

Lines are counted without comments, docstrings and blank ones. Imports count wherever they stand: at the top, for type
checkers only, or inside a function.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = {"hf_memopt": "hf_memopt", "callbacks": "hf_memopt.callbacks", "recipes": "hf_memopt.recipes"}


class Lines(NamedTuple):
    """How many lines of a file are code, comments and docstrings."""

    code: int
    comments: int
    docstrings: int


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the source files by the name of the module that each is installed as."""
    found = {}
    for folder, package in PACKAGES.items():
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = file
    return found


def lines(file: Path) -> Lines:
    """Count a file's lines."""
    source = file.read_text()
    docstrings = {line for node in _documented(ast.parse(source)) for line in range(node.lineno, _end(node) + 1)}
    code, comments = set(), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments += 1
        elif token.string.strip():
            code.update(range(token.start[0], token.end[0] + 1))
    return Lines(len(code - docstrings), comments, len(docstrings))


def imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the modules of ours that each module imports. A package stands for its `__init__`."""
    files = modules(root)
    edges = {}
    for name, file in files.items():
        found = {_longest(target, files) for target in _imported(ast.parse(file.read_text()))}
        edges[name] = found - {"", name}
    return edges


def folder_imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the packages that the modules of each package import from, itself and exported names left out."""
    files = modules(root)
    edges: dict[str, set[str]] = {}
    for name, others in imports(root).items():
        for module in (name, *others):
            edges.setdefault(module.rpartition(".")[0], set())
        is_package = files[name].stem == "__init__"
        found = {other.rpartition(".")[0] for other in others if files[other].stem != "__init__"}
        edges[name.rpartition(".")[0]] |= set() if is_package else found - {name.rpartition(".")[0]}
    return edges


def groups(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected groups of more than one module, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in edges[module]:
            if other not in order:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == order[module]:
            place = stack.index(module)
            group = stack[place:]
            del stack[place:]
            if len(group) > 1:
                found.append(sorted(group))

    for module in edges:
        if module not in order:
            visit(module)
    return found


def repeated(names: Iterable[str]) -> list[str]:
    """Return what occurs more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def public_classes(file: Path) -> list[str]:
    """Return the names of a file's public classes."""
    tree = ast.parse(file.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def _documented(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            yield first.value


def _end(node: ast.expr) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _longest(target: str, files: dict[str, Path]) -> str:
    """Return the module that an import loads: `package.module.name` loads `package.module`."""
    while target and target not in files:
        target = target.rpartition(".")[0]
    return target


def main() -> int:
    """Print the figures."""
    files = modules()
    for folder in PACKAGES:
        counted = [lines(file) for file in files.values() if file.relative_to(ROOT).parts[0] == folder]
        code, comments, docstrings = (sum(column) for column in zip(*counted, strict=True))
        share = 100 * comments / (code + comments)
        print(f"{folder:10} {len(counted):4} modules {code:6} lines of code {docstrings:5} of docstrings", end="")
        print(f" {share:4.1f} % comments")
    library = {name: file for name, file in files.items() if file.name != "__init__.py" and "recipes" not in name}
    print("module names that occur twice:", repeated(file.stem for file in library.values()) or "none")
    classes = [name for file in library.values() for name in public_classes(file)]
    print("public classes that occur twice:", repeated(classes) or "none")
    print("strongly connected groups:", groups(imports()) or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
