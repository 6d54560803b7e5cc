"""The simulator's changes to torch, transformers and accelerate, and to no other package of this library."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_memopt.planning

ROOT = Path(hf_memopt.planning.__file__).parent
# Methods that change their own object, such as a table of another module.
CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
CHANGING_BY_NAME = {"setattr", "delattr", "patch.object", "patch.dict", "patch.multiple"}


def test_estimates_change_nothing_of_other_packages() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 10
    assert [f"{file.relative_to(ROOT)}: {each}" for file in files for each in changes(file.read_text())] == []


IMPORTS = """
from hf_memopt.activations import plan_maker
from hf_memopt.autograd_state import PLAIN_TYPES
import hf_memopt.transfer.copier
"""


@pytest.mark.parametrize(
    "line",
    [
        "patch.object(plan_maker, 'room_on', None)",
        "mock.patch.object(plan_maker, 'room_on', None)",
        "patch.dict(plan_maker.UNLIMITED, {})",
        "patch('hf_memopt.activations.plan_maker.room_on')",
        "setattr(plan_maker, 'room_on', None)",
        "plan_maker.room_on = None",
        "plan_maker.DeviceRoom.end += 1",
        "plan_maker.TABLE['cpu'] = 1",
        "del plan_maker.TABLE['cpu']",
        "PLAIN_TYPES.add(int)",
        "hf_memopt.transfer.copier.StreamCopier.stall_ms = None",
    ],
)
def test_a_planted_change_is_found(line: str) -> None:
    assert list(changes(IMPORTS + line)) == [line]


@pytest.mark.parametrize(
    "line",
    ["plan_maker.room_on(1)", "patch.object(torch, 'compile', None)", "self.rows = plan_maker", "rows = PLAIN_TYPES"],
)
def test_what_is_asked_or_belongs_to_others_is_allowed(line: str) -> None:
    assert list(changes(IMPORTS + line)) == []


def changes(source: str) -> Iterator[str]:
    """Yield the lines that change an import from another package of the library."""
    tree = ast.parse(source)
    foreign = set(_foreign(tree))
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [each for each in node.targets if not isinstance(each, ast.Name)]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target] if not isinstance(node.target, ast.Name) else []
        elif isinstance(node, ast.Call):
            targets = list(_changed_by(node))
        if any(_root(each) in foreign for each in targets) or _patches_by_path(node):
            yield ast.unparse(node)


def _changed_by(call: ast.Call) -> Iterator[ast.expr]:
    name = ast.unparse(call.func)
    if any(name == each or name.endswith(f".{each}") for each in CHANGING_BY_NAME):
        yield call.args[0]
    elif isinstance(call.func, ast.Attribute) and call.func.attr in CHANGING:
        yield call.func.value


def _patches_by_path(node: ast.AST) -> bool:
    is_patch = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "patch"
    return is_patch and "hf_memopt" in ast.unparse(node)


def _foreign(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module imports from other packages of the library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.asname or each.name.partition(".")[0] for each in node.names if "hf_memopt" in each.name)
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("hf_memopt") and not module.startswith("hf_memopt.planning"):
            yield from (each.asname or each.name for each in node.names)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
