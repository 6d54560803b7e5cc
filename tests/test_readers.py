"""Tests that no source file calls a reader that could run code or leave a dataset's folder, but for the named ones."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("hf_memopt", "callbacks", "recipes", "benchmarks", "plugins", "space")
SOURCES = {str(file.relative_to(ROOT)): file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))}

DATASETS = {"load_dataset", "load_dataset_builder", "load_from_disk"}
OF_FILES = {f"from_{kind}" for kind in ("file", "csv", "json", "parquet", "text", "sql", "spark", "generator")}
PICKLES = {("pickle", "load"), ("pickle", "loads"), ("pickle", "Unpickler"), ("np", "load"), ("numpy", "load")}
PICKLES |= {("torch", "load"), ("joblib", "load"), ("marshal", "loads"), ("pd", "read_pickle"), ("yaml", "load")}
# Readers that are called with arguments under which they run nothing.
SAFE = {("torch", "load"): "weights_only=True", ("np", "load"): "allow_pickle=False"}
# These unpickle their own child's results, and an index of shards with the classes that it may name.
ALLOWED = {
    ("hf_memopt/planning/simulation/child_process.py", "pickle.loads"),
    ("hf_memopt/datasets_by_name.py", "load_dataset_builder"),
    ("hf_memopt/datasets_by_name.py", "from_file"),
}


def complaints(name: str, source: str) -> Iterator[str]:
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        module = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        words = {f"{each.arg}={ast.unparse(each.value)}" for each in call.keywords}
        is_reader = function in DATASETS or (function in OF_FILES and module.endswith("Dataset"))
        if (module, function) in PICKLES:
            is_reader, function = SAFE.get((module, function)) not in words, f"{module}.{function}"
        if function == "from_pretrained" and module.split(".")[-1].startswith("Auto") and "Autoencoder" not in module:
            is_reader = "trust_remote_code=False" not in words
        if is_reader and (name, function) not in ALLOWED:
            yield f"{name}:{call.lineno}: {ast.unparse(call.func)}"
        yield from (f"{name}:{call.lineno}: {word}" for word in words if word.startswith("trust_remote_code=T"))


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "np.load(file)",
        "pickle.loads(content)",
        "datasets.load_dataset(name)",
        "load_from_disk(name)",
        "Dataset.from_parquet(name)",
        "AutoTokenizer.from_pretrained(name)",
        "f(trust_remote_code=True)",
        "yaml.load(text)",
    ],
)
def test_a_planted_reader_is_found(source: str) -> None:
    assert len(list(complaints("planted.py", source))) == 1


def test_no_source_file_has_one() -> None:
    assert len(SOURCES) > 100
    assert [each for name, file in SOURCES.items() for each in complaints(name, file.read_text())] == []
