"""The blocks of README and first page, for a user who has installed the wheel and has no clone, in an empty folder."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from built_wheels import ROOT, Environment
from docs_blocks import blocks

pytestmark = pytest.mark.e2e

PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
TESTS = ROOT / "tests"
# First words of commands that fetch something, or need the clone.
NOT_HERE = {"git", "cd", "make", "pip", ".", ".venv/bin/python"}
OF_THE_CLONE = ("benchmarks.", "recipes/", "space/")
# Subcommands that run as they stand, and words that each prints; the models that they name are folders here, and the
# script trains the head of a tiny model.
RUN = {
    "estimate": r"\bfits\b",
    "plan": r"\bfits\b",
    "launch": r"train_runtime",
    "verify": r"equal, bit for bit",
    "doctor": r"torch",
    "configs": r"configs",
}
SCRIPT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
model.model.requires_grad_(False)
data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, 8))]
Trainer(model, TrainingArguments("out", max_steps=3, use_cpu=True, report_to=[]), train_dataset=data).train()
"""
MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 40960,
}
WITH_STAND_INS = f"""
import sys
sys.path += [{str(TESTS)!r}, {str(TESTS / "toys")!r}]
import docs_blocks, hf_memopt
docs_blocks.run_block(sys.argv[1], open("block.py").read())
print(hf_memopt.__file__)
"""


def python_blocks() -> list[Any]:
    return [pytest.param(page.stem, text, id=f"{page.stem}-{line}") for page in PAGES for line, text in blocks(page)]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in a page's bash blocks, and of each whole command in its sentences."""
    inline = re.findall(rf"`(hf-memopt (?:{'|'.join(RUN)}) [^`]+)`", page.read_text())
    for text in [*(text for _, text in blocks(page, "bash")), *inline]:
        for line in text.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                if words := shlex.split(command, comments=True):
                    yield words


def runs_here(words: list[str]) -> bool:
    if words[0] in NOT_HERE:
        return False
    if words[0] == "python" and any(word.startswith(OF_THE_CLONE) for word in words[1:]):
        return False
    assert words[0] == "hf-memopt", f"{words}: a new kind of command; run it here, or say why not"
    assert words[1] in RUN, f"{words}: a new kind of command; run it here, or say why not"
    return True


COMMANDS = {shlex.join(words): words for page in PAGES for words in commands(page)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_of_known_kinds(page: Path) -> None:
    assert set(re.findall(r"^```(\w*)", page.read_text(), re.MULTILINE)) <= {"bash", "python", ""}


def test_commands_of_all_kinds_are_found() -> None:
    assert {words[0] for words in COMMANDS.values()} >= {"git", "pip", "make", "hf-memopt"}
    with pytest.raises(AssertionError, match="a new kind of command"):
        runs_here(["curl", "https://example.org"])


@pytest.mark.parametrize("words", [words for words in COMMANDS.values() if runs_here(words)], ids=shlex.join)
@pytest.mark.sweep(share=0.15)
def test_a_command_runs(words: list[str], installed: Environment, tmp_path: Path) -> None:
    if words[1] in ("estimate", "plan"):
        (tmp_path / words[2]).mkdir(parents=True)
        (tmp_path / words[2] / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "train.py").write_text(SCRIPT)
    printed = installed.run(*words, cwd=tmp_path)
    assert re.search(RUN[words[1]], printed), printed


@pytest.mark.parametrize(("page", "text"), python_blocks())
@pytest.mark.sweep(share=0.3)
def test_a_python_block_runs(page: str, text: str, installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(text)
    printed = installed.run("python", "-c", WITH_STAND_INS, page, cwd=tmp_path)
    assert Path(printed.splitlines()[-1]).is_relative_to(installed.packages)
