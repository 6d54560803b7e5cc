import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, PartialState

pytestmark = pytest.mark.e2e

SCRIPTS = Path(__file__).parents[2] / "recipes" / "by_feature"
LONGEST = 80
MARK = "# hf_memopt"
PACKAGES = {
    "accelerate",
    "argparse",
    "collections",
    "contextlib",
    "copy",
    "diffusers",
    "hf_memopt",
    "peft",
    "tempfile",
    "torch",
    "transformers",
    "typing",
}
# Imports of the scripts for other libraries' trainers.
OTHERS = {
    "datasets",
    "lightning",
    "pathlib",
    "sentence_transformers",
    "tokenizers",
    "trl",
}
# Parts of the output.
SHOWN = {
    "activation_offloading": r"\d+ MiB went to host memory and came back\nWeights equal to those without .*: True",
    "offload_budget": r"(?s)kept  offloaded .*peak: 0\.00(1\d\d|200) GiB predicted, 0\.00(1\d\d|200) GiB measured",
    "selective_checkpointing": r"(?s)none .* MiB saved.*heavy_ops .*plain ones: True\nall .*plain ones: True",
    "frozen_teacher": r"(?s)step 100  loss 0\.00.*in host memory: 4\.2 MiB",
    # The student's error is less than half of the teacher's: from 22 to 31 % of it with three seeds.
    "image_reflow": r"(?s), [1-4]?\d% of it\n[1-9]\d* MiB went .*teacher: swap on .*offloading: True",
    "streamed_base": r"(?s)frozen weights: 26\.50 MiB .* their files.* 1\.50 MiB at most.*base in memory: True",
    "offloaded_optimizer": r"(?s)state in a file, .* 10 updates read .* TB per day .*state on the device: True",
    "trained_weights": r"(?s)weights: 8\.00 MiB .* 2\.00 MiB at most.*gradients: 32\.00 MiB.*training in memory: True",
    "exact_accumulation": r"step 50  loss 0\.\d+ .*\nstep 100  loss 0\.0\d+  in 2 micro-batches",
    "gradient_cache": r"(?s)gradient: \d\.\de-0[678] of the largest entry.*step 60  loss 0\.\d+",
    "memory_reports": r"(?s)backward +\d.*No memory leak: .*\nMemory leak: .*held by .*kept_losses\[49\]",
    "estimate_then_train": r"(?s)It fits on rtx4090.*is in backward.*Time of a step: ",
    "trainers/dpo": r"[1-9]\d*\.\d MiB went to host memory and came back\nWeights equal to those without .*: True",
    "trainers/lightning_trainer": r"[1-9]\d*\.\d MiB went to host .*\nWeights equal .*: True",
    "trainers/denoising": r"(?s)unet: loss .*[1-9]\d*\.\d MiB went to host .*\nWeights equal .*: True",
    "trainers/sentence_embeddings": r"Loss \d\.\d+, later \d\.\d+\nLargest difference of a weight: \de-0[678]",
    "trainers/grpo": r"(?s)reward 0\.[0-5]\d, later 0\.[6-9]\d\n[1-9]\d*\.\d MiB went to host .*offloading: True",
}


def marked_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if MARK in line]


def test_there_is_one_for_each_feature() -> None:
    files = [file.relative_to(SCRIPTS).with_suffix("") for file in SCRIPTS.rglob("*.py") if file.stem != "__init__"]
    assert {file.as_posix() for file in files} == {*SHOWN}


@pytest.mark.parametrize("name", SHOWN)
def test_it_is_short_and_stands_alone(name: str) -> None:
    text = (SCRIPTS / f"{name}.py").read_text()
    assert len(text.splitlines()) <= LONGEST
    assert len(marked_lines(text)) >= 2
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert not node.module.startswith("hf_memopt.recipes")
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
        assert {module.partition(".")[0] for module in modules} <= PACKAGES | (OTHERS if "/" in name else set())


# Lightning's own warnings: advice about workers, and calls of its pytree helper.
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*_pytree:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.sweep(share=0.25)
def test_it_shows_its_feature(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    PartialState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(SHOWN[name], printed), printed
