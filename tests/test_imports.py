"""Tests that each part of the project imports only parts below it, and few libraries."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from structure import ROOT, modules

import hf_memopt

# From the bottom up; parts on one line do not import each other. A new part is added here and to LIBRARIES.
LAYERS = (
    ("autograd_state", "disk", "process_trees", "ranges", "text_table", "uncompiled", "units"),
    ("command_line", "text_files"),
    ("transfer", "reflow"),
    ("memory",),
    ("activations",),
    ("weights",),
    ("report",),
    ("training", "checkpoint"),
    ("exactness",),
    ("callbacks", "datasets_by_name"),
    ("planning",),
    ("lerobot", "integrations.lightning", "integrations.sentence_transformers", "integrations.train_orpo"),
    ("recipes",),
)
LAYER = {part: height for height, parts in enumerate(LAYERS) for part in parts}

# The libraries that each part may import besides the standard library; recipes may import any.
LIBRARIES = {
    "process_trees": {"psutil"},
    "ranges": set(),
    "text_files": {"yaml"},
    "text_table": set(),
    "units": set(),
    "disk": {"torch", "filelock"},
    "command_line": set(),
    "datasets_by_name": {"datasets", "huggingface_hub"},
    "transfer": {"torch"},
    "autograd_state": {"torch"},
    "uncompiled": {"torch"},
    "reflow": {"torch"},
    "memory": {"torch", "psutil"},
    "activations": {"torch"},
    "weights": {"torch"},
    "report": {"torch", "psutil", "jinja2", "matplotlib"},
    "training": {"torch", "accelerate", "torchao"},
    "checkpoint": {"torch", "accelerate", "safetensors", "numpy"},
    "exactness": {"torch"},
    "integrations": set(),
    "lerobot": {
        "torch",
        "accelerate",
        "datasets",
        "pyarrow",
        "transformers",
        "lerobot",
        "peft",
        "yaml",
        "gymnasium",
        "safetensors",
        "huggingface_hub",
        "httpx",
        "draccus",
        "tqdm",
    },
    "integrations.train_orpo": {"torch", "transformers", "trl", "datasets", "peft"},
    "integrations.lightning": {"torch", "lightning"},
    "integrations.sentence_transformers": {"torch", "sentence_transformers", "transformers", "datasets", "peft"},
    "callbacks": {"torch", "transformers", "accelerate", "numpy"},
    "planning": {
        "torch",
        "accelerate",
        "cpuinfo",
        "datasets",
        "deepspeed",
        "diffusers",
        "draccus",
        "httpx",
        "huggingface_hub",
        "lerobot",
        "peft",
        "tokenizers",
        "torchao",
        "tqdm",
        "transformers",
        "trl",
        "yaml",
    },
}

# The package's public face and its command name all parts, and import each part at its use.
LAZY = ("", "cli")
# The libraries that the lazy parts use themselves, within functions only.
OF_LAZY = {"cli": {"shtab"}}
# Modules that the lazy parts may import at once; `tests/planning/test_job.py` checks that the last imports no library.
LIGHT = (
    "hf_memopt.ranges",
    "hf_memopt.command_line",
    "hf_memopt.process_trees",
    "hf_memopt.units",
    "hf_memopt.planning.job",
    "hf_memopt.planning.job_flags",
)


class Import(NamedTuple):
    module: str
    deferred: bool  # inside a function, or for type checkers only


def test_the_repository_imports_one_way() -> None:
    assert len(modules()) > 20
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("hf_memopt/transfer/planted.py", "import hf_memopt.weights.offload", "'transfer' may not import 'weights'"),
        ("hf_memopt/transfer/planted.py", "from ..memory import MemoryTracker", "'transfer' may not import 'memory'"),
        ("hf_memopt/weights/planted.py", "from hf_memopt import recipes", "'weights' may not import 'recipes'"),
        ("hf_memopt/weights/planted.py", "def f():\n    import hf_memopt.callbacks", "may not import 'callbacks'"),
        ("hf_memopt/weights/planted.py", "from hf_memopt import MemoryTracker", "may not import 'MemoryTracker'"),
        ("hf_memopt/weights/planted.py", "def f():\n    import transformers.utils", "the library transformers"),
        ("hf_memopt/integrations/__init__.py", "import lerobot", "'integrations' may not import the library lerobot"),
        ("hf_memopt/integrations/other/planted.py", "import torch", "unknown part 'integrations.other'"),
        ("hf_memopt/novel.py", "import torch", "unknown part 'novel'"),
        ("hf_memopt/cli/planted.py", "import torch", "imports torch before it is used"),
        ("hf_memopt/cli/planted.py", "import shtab", "imports shtab before it is used"),
        ("hf_memopt/cli/planted.py", "from hf_memopt.weights import OffloadedTeacher", "before it is used"),
        (
            "hf_memopt/cli/planted.py",
            "def f():\n    from hf_memopt.recipes import toy",
            "'cli' may not import 'recipes'",
        ),
        ("hf_memopt/__init__.py", "if True:\n    import torch", "imports torch before it is used"),
        ("callbacks/planted.py", "from hf_memopt.recipes import toy", "'callbacks' may not import 'recipes'"),
        ("callbacks/planted.py", "import hf_memopt.lerobot", "may not import 'lerobot'"),
        ("callbacks/planted.py", "import lerobot.utils", "'callbacks' may not import the library lerobot"),
        ("recipes/planted.py", "import callbacks.logging", "import hf_memopt.callbacks instead"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    _plant(tmp_path, file, source)
    (found,) = violations(tmp_path)
    assert file in found
    assert complaint in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("hf_memopt/weights/planted.py", "import json\nfrom . import packed_weights\nfrom ..transfer import Copier"),
        ("hf_memopt/lerobot/planted.py", "from lerobot import configs\nfrom hf_memopt import reflow"),
        ("hf_memopt/__init__.py", "if TYPE_CHECKING:\n    from hf_memopt.weights import OffloadedTeacher"),
        ("hf_memopt/cli/planted.py", "def f():\n    from hf_memopt.lerobot import students"),
        ("callbacks/planted.py", "import transformers\nfrom hf_memopt import MemoryTracker"),
        ("recipes/planted.py", "import numpy, hf_memopt\nfrom hf_memopt.callbacks import logging"),
    ],
)
def test_what_is_allowed_is_not_complained_of(tmp_path: Path, file: str, source: str) -> None:
    _plant(tmp_path, file, source)
    assert violations(tmp_path) == []


def violations(root: Path) -> list[str]:
    """Return a line for each import below `root` that breaks a rule."""
    found = []
    for module, file in modules(root).items():
        importer = _part(module)
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for imported in _imports(ast.parse(file.read_text()), package):
            complaint = _complaint(importer, imported)
            if complaint:
                found.append(f"{file.relative_to(root)}: {complaint}")
    return found


def _complaint(importer: str, imported: Import) -> str | None:
    library = imported.module.partition(".")[0]
    if library in ("callbacks", "recipes"):
        return f"import hf_memopt.{library} instead of {library}, which is no module once installed"
    if importer not in {*LAYER, *LIBRARIES, *LAZY}:
        return f"unknown part {importer!r}; give it a place in LAYERS and LIBRARIES"
    if library == "hf_memopt":
        return _complaint_about_part(importer, _part(imported.module), imported)
    if library in sys.stdlib_module_names or importer == "recipes":
        return None
    if importer in LAZY:
        if imported.deferred and library in OF_LAZY.get(importer, set()):
            return None
        return f"{importer or 'hf_memopt'!r} imports {library} before it is used"
    return None if library in LIBRARIES[importer] else f"{importer!r} may not import the library {library}"


def _complaint_about_part(importer: str, part: str, imported: Import) -> str | None:
    if part in (importer, "__version__"):
        return None
    if importer in LAZY:
        allowed = LAYER.get(part, 0) < LAYER["recipes"]
        if allowed and not imported.deferred and not imported.module.startswith(LIGHT):
            return f"{importer!r} imports {imported.module} before it is used"
    elif part in LAYER:
        allowed = LAYER[part] < LAYER.get(importer, 0)
    else:  # a public name, for those who use the library from outside
        allowed = part in ("", *hf_memopt.__all__) and importer in ("callbacks", "recipes")
    return None if allowed else f"{importer!r} may not import {part!r}"


def _part(module: str) -> str:
    """Return `weights` for `hf_memopt.weights.offload`; each integration is a part of its own."""
    _, *names = module.split(".")
    return ".".join(names[: 2 if names[:1] == ["integrations"] else 1])


def _imports(node: ast.AST, package: str, deferred: bool = False) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, deferred) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (Import(name, deferred) for name in _imported_from(node, package))
    deferred = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_type_checkers(node)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, deferred)


def _imported_from(node: ast.ImportFrom, package: str) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    return (f"{base}.{alias.name}" for alias in node.names)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _plant(root: Path, file: str, source: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
