"""Training scripts of TRL and lerobot, as they are installed, under the switches that `verify` compares."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_trainers import decoder, tokenizer

from hf_memopt.exactness.comparison import compare

OFFLOADED = ("offload=all", "offload_threshold_mb=0")
CHECKPOINTED = ("gradient_checkpointing=true",)
TRL = ("per_device_train_batch_size=2", "gradient_checkpointing=false", "use_cpu=true", "max_steps=5", "report_to=none")
SAID = [{"role": "user", "content": "then one"}]
ANSWERS = [[{"role": "assistant", "content": text}] for text in ("two two two one", "three then three")]
REWARD = """
def length(completions, **columns):
    return [float(len(completion[0]["content"]) + number) for number, completion in enumerate(completions)]
"""
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"messages": SAID + ANSWERS[0]},
    "dpo": {"prompt": SAID, "chosen": ANSWERS[0], "rejected": ANSWERS[1]},
    "kto": {"prompt": SAID, "completion": ANSWERS[0], "label": True},
    "grpo": {"prompt": SAID},
}
MORE = {"grpo": ("num_generations=2", "max_completion_length=8", "reward_funcs=rewards.length")}


@pytest.fixture
def trl_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes a model and data, and returns the command of a script of TRL."""
    words = tokenizer()
    words.chat_template = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
    (tmp_path / "rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    for part in (decoder(), words):
        part.save_pretrained(tmp_path / "model")

    def command(name: str, precision: str) -> list[str]:
        data = tmp_path / "data"
        data.mkdir()
        rows = [ROWS[name] | ({"label": bool(number % 2)} if name == "kto" else {}) for number in range(16)]
        (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files = (f"model_name_or_path={tmp_path / 'model'}", f"dataset_name={data}", f"output_dir={tmp_path / 'out'}")
        options = (*TRL, *MORE.get(name, ()), *files, f"bf16={precision == 'bf16'}")
        return ["-m", f"trl.scripts.{name}", *(word for option in options for word in f"--{option}".split("=", 1))]

    return command


@pytest.mark.parametrize("switch", [OFFLOADED, CHECKPOINTED], ids=["offloaded", "checkpointed"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.sweep(share=0.25)
def test_scripts_of_trl(
    name: str, precision: str, switch: tuple[str, ...], trl_words: Any, record_command: Any, tmp_path: Path
) -> None:
    words = trl_words(name, precision)
    plain = record_command(*words, texts=switch, is_switched=False)
    switched = record_command(*words, texts=switch)
    found = compare(plain, switched)
    assert found.verdict == "equal", found.first
    assert found.not_compared == []
    assert plain.num_steps == 2
    assert found.num_gradients > 20
    assert plain.precision == ("bfloat16" if precision == "bf16" else None)
    assert not (tmp_path / "out").exists()


def test_a_change_of_a_script_of_trl_is_found(trl_words: Any, record_command: Any) -> None:
    words, switch = trl_words("sft", "float32"), ("learning_rate=1e-3",)
    runs = [record_command(*words, texts=switch, is_switched=each) for each in (False, True)]
    first = compare(*runs).first
    assert first is not None
    assert str(first.place).startswith("lr of ")


@pytest.mark.slow
def test_training_of_lerobot(
    toy_dataset: Path, record_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lerobot_runs import new_process

    monkeypatch.delitem(sys.modules, "lerobot.scripts.lerobot_train")  # runpy warns of a module that is loaded
    sizes = ("dim_model=32", "n_heads=2", "dim_feedforward=64", "n_encoder_layers=1", "n_vae_encoder_layers=1")
    policy = ("type=act", "device=cpu", "push_to_hub=false", "pretrained_backbone_weights=null", "chunk_size=8")
    options = [f"--policy.{each}" for each in (*policy, *sizes, "n_action_steps=8", "latent_dim=8")]
    data = ["--dataset.repo_id=toy/dataset", f"--dataset.root={toy_dataset}", f"--output_dir={tmp_path / 'out'}"]
    words = ["--steps=5", "--batch_size=2", "--num_workers=0", "--save_checkpoint=false", *options, *data]
    command = ["-m", "lerobot.scripts.lerobot_train", *words]
    with new_process(()):
        runs = [record_command(*command, texts=OFFLOADED, is_switched=each) for each in (False, True)]
    found = compare(*runs)
    assert found.verdict == "equal", found.first
    assert runs[0].num_steps == 2
    assert found.num_gradients > 50
    assert not torch.are_deterministic_algorithms_enabled()
