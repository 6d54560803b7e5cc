"""Blocks of the README and the documentation: found, and run with stand-ins for the reader's own names."""

import ast
import builtins
import re
import symtable
from collections.abc import Iterable, Iterator
from pathlib import Path

from docs_stand_ins import ALL, PAGES, Toys, dpo_trainer, lora, two_layers

# Pages with two kinds of model, by a line of the block.
OTHER_TOYS = {
    'frozen="auto"': {"trainer": dpo_trainer},
    "share_with=student": {"student": lora},
    "GradientCache(accelerator": {"model": two_layers},
}


def blocks(file: Path, language: str = "python") -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of each block of a page."""
    text = file.read_text()
    for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start()) + 1, found.group(1)


def run_block(page: str, text: str) -> None:
    """Run a Python block of a page."""
    toys = Toys(page)
    names = given(text)
    assert names <= {*ALL, *PAGES.get(page, {})}, "neither imported nor the reader's own"
    other = {name: make for line, makes in OTHER_TOYS.items() if line in text for name, make in makes.items()}
    toys.replace(other)
    exec(compile(text, f"{page}.md", "exec"), {name: toys[name] for name in names} | {"__name__": "__main__"})


def given(text: str) -> set[str]:
    """Return the names that a block reads and does not define."""
    tables, free = [symtable.symtable(text, "block", "exec")], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        free |= {name.get_name() for name in table.get_symbols() if name.is_global() or (top and name.is_referenced())}
    return free - defined(text) - set(dir(builtins))


def defined(text: str) -> set[str]:
    """Return the names that a block gives a value before any line reads them."""
    names: set[str] = set()
    read: set[str] = set()
    for statement in ast.parse(text).body:
        nodes = list(ast.walk(statement))
        loads = _names(nodes, ast.Load)
        comprehended = {name for node in nodes if isinstance(node, ast.comprehension) for name in _names([node.target])}
        # An assignment's right side is read first; in loops and contexts the targets come first.
        if isinstance(statement, ast.Assign | ast.AugAssign):
            read |= loads - names
        names |= (_names(nodes, ast.Store) - read) | comprehended
        names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        names |= {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    return names


def _names(nodes: Iterable[ast.AST], context: type[ast.expr_context] = ast.Store) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
