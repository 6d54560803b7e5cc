"""Measures files, lines, words and circles of imports, all imports included: `python tests/structure.py`."""

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"hf_memopt": "hf_memopt", "callbacks": "hf_memopt.callbacks", "recipes": "hf_memopt.recipes"}


# Subjects of riddles: sentences about these words seldom name the thing.
RIDDLES = re.compile(r"\b(what|whoever|whatever|nobody|somebody)\b", re.IGNORECASE)


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return source files by the name of the installed module."""
    found = {}
    for folder, package in PACKAGES.items():
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = file
    return found


def prose(file: Path) -> list[str]:
    source = file.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return comments + [text for node in nodes if (text := ast.get_docstring(node)) is not None]


def imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Return each module's imports of ours; a package stands for its `__init__`."""
    files = modules(root)
    edges = {}
    for name, file in files.items():
        found = {_longest(target, files) for target in imported(ast.parse(file.read_text()))}
        edges[name] = found - {"", name}
    return edges


def folder_imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the packages that each package imports from, itself and exported names left out."""
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
    """Return strongly connected groups of more than one module, by Tarjan's algorithm."""
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
    """Return the names that occur more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def public_classes(file: Path) -> list[str]:
    tree = ast.parse(file.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules and names that a file imports by their full names."""
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
    for name, folders in {"product": [*PACKAGES], "benchmarks": ["benchmarks"], "tests": ["tests"]}.items():
        files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
        lengths = [len(file.read_text().splitlines()) for file in files]
        texts = [text for file in files for text in prose(file)]
        num_words = sum(len(text.split()) for text in texts)
        riddles = 1000 * sum(len(RIDDLES.findall(text)) for text in texts) / num_words
        print(
            f"{name:10} {len(files):4} files {sum(lengths):6} lines, median {statistics.median(lengths):3.0f}", end=""
        )
        print(f"; {num_words:6} words of docstrings and comments, {riddles:.1f} riddles in 1,000")
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "LOG.md"]  # which is not on the site
    words = [len(page.read_text().split()) for page in pages]
    print(f"pages      {len(pages):4} files {sum(words):6} words, at most {max(words)} on a page")
    library = [file for name, file in modules().items() if ".recipes" not in name]
    classes = [name for file in library for name in public_classes(file)]
    print("public classes that occur twice:", repeated(classes) or "none")
    print("strongly connected groups of modules:", groups(imports()) or "none")
    print("strongly connected groups of folders:", groups(folder_imports()) or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
