"""`--trainer`: the commands that `plan` prints, run at toy size, and answers without notes of the libraries."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trl_trainers
import yaml

from hf_memopt.cli import main
from hf_memopt.planning.job import TRAINERS

PAIR = {"prompt": "then one", "chosen": " two two", "rejected": " three three"}
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"text": "one two three"},
    "dpo": PAIR,
    "kto": {"prompt": "then one", "completion": " two two"},
    "orpo": PAIR,
    "reward": PAIR,
    "grpo": {"prompt": "then one"},
}
FIELDS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}
OF_GRPO = {"num_generations": 4, "max_completion_length": 8, "reward_funcs": ["rewards.none"]}


def files(folder: Path, name: str) -> Path:
    """Write a tiny model with its tokenizer, a dataset, a reward and a file of arguments."""
    model = trl_trainers.decoder()
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder / "model")
    trl_trainers.tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rows = [ROWS[name] | ({"label": bool(number % 2)} if name == "kto" else {}) for number in range(8)]
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text("def none(completions, **columns):\n    return [0.0] * len(completions)\n")
    fields = FIELDS | {"model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "data")}
    fields |= {"output_dir": str(folder / "trained")} | (OF_GRPO if name == "grpo" else {})
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(fields))
    return folder / f"{name}.yaml"


@pytest.mark.e2e
@pytest.mark.sweep(share=0.1)
@pytest.mark.parametrize("name", TRAINERS[1:])
def test_the_printed_command_trains(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--training-args", str(files(tmp_path, name)), "--trainer", name, "--seq-len", "32"]
    assert main([*words, "--gpu", "8GiB", "--output", str(tmp_path / "plan"), "--workers", "1"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[:2] == ["accelerate", "launch"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *command[2:]]
    done = subprocess.run(launch, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trained" / "model.safetensors").is_file()
    written = yaml.safe_load((tmp_path / "plan" / f"{name}.yaml").read_text())
    assert written["per_device_train_batch_size"] * written["gradient_accumulation_steps"] == 4


@pytest.mark.e2e
@pytest.mark.parametrize("words", [["--trainer", "orpo"], ["--trainer", "dpo"], []])
@pytest.mark.sweep(share=0.3)
def test_the_answer_begins_with_the_first_line(words: list[str], tmp_path: Path) -> None:
    file = files(tmp_path, "dpo")
    arguments = ["estimate", str(tmp_path / "model"), "--seq-len", "32", *words]
    if not words:
        file.write_text("bf16: true\n")
        arguments += ["--training-args", str(file)]
    run = f"import sys; from hf_memopt.cli import main; sys.exit(main({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    trainer = {"orpo": "ORPOTrainer", "dpo": "DPOTrainer", "": "Trainer"}[words[-1] if words else ""]
    assert done.stdout.startswith(f"{trainer} of {tmp_path / 'model'}")


@pytest.mark.e2e
def test_adapters_on_experts_bring_no_warnings(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64, "head_dim": 8}
    config |= {"intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | {"max_position_embeddings": 64}))
    arguments = ["estimate", str(tmp_path), "--seq-len", "16", "--lora-rank", "2"]
    run = f"import sys; from hf_memopt.cli import main; sys.exit(main({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.e2e
def test_where_it_does_not_fit_the_plan_for_the_same_trainer_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files(tmp_path, "dpo")
    words = ["estimate", str(tmp_path / "model"), "--trainer", "dpo", "--seq-len", "32", "--batch-size", "4"]
    assert main([*words, "--gpu", "0.62GiB", "--check"]) == 1
    expected = f"--model {tmp_path / 'model'} --gpu 0.62GiB --effective-batch 4 --trainer dpo --seq-len 32"
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"hf-memopt plan {expected}")
