"""`--training-args FILE`, and the flags that overrule it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from late_imports import LateModule

from hf_memopt.cli import main, planning_commands

argument_file = LateModule("hf_memopt.planning.workloads.argument_file")
trainer_fields = LateModule("hf_memopt.planning.workloads.trainer_fields")
transformers = LateModule("transformers")

FILE: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_length": 48,
    "use_peft": True,
    "lora_r": 4,
    "lora_target_modules": ["q_proj"],
    "learning_rate": "2e-4",
    "eval_strategy": "steps",
    "report_to": "wandb",
    "dataset_name": "trl-lib/Capybara",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=320, max_position_embeddings=128, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(FILE | {"model_name_or_path": str(tmp_path / "model")}))
    return path


def changes_of(*words: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(planning_commands, "_estimate", lambda spec: found.append(trainer_fields.of_job(spec)) or 0)
    assert main(["estimate", "--training-args", "a.yaml", *words]) == 0
    return found[0]


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (["--batch-size", "1"], {"per_device_train_batch_size": 1}),
        (["a/model", "--dtype", "bfloat16"], {"model_name_or_path": "a/model", "dtype": "bfloat16"}),
        (["--precision", "fp16"], {"bf16": False, "fp16": True}),
        (["--precision", "no", "--checkpointing", "none"], {"bf16": False, "fp16": False}),
        (["--optimizer", "adamw-8bit"], {"optim": "adamw_torch_8bit"}),
        (["--quantize", "nf4"], {"load_in_4bit": True, "load_in_8bit": False}),
        (["--lora-rank", "8", "--lora-targets", "q_proj,v_proj"], {"lora_r": 8, "use_peft": True}),
        (["--attention", "auto"], {"attn_implementation": None}),
        (["--gpu", "t4", "--offload", "all"], {}),
    ],
)
def test_flags_become_fields(words: list[str], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = changes_of(*words, monkeypatch=monkeypatch)
    assert found.items() >= changes.items()
    assert "learning_rate" not in found
    assert changes or found == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "a=b"], "--set='a=b' is for recipes and robot policies"),
        (["--recipe", "lgt"], "--recipe='lgt' with a trainer or --training-args: name one of them"),
    ],
)
def test_flags_of_recipes_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--training-args", "a.yaml", *words]) == 2
    assert capsys.readouterr().err.startswith(f"hf-memopt estimate: error: {message}")


@pytest.mark.e2e
def test_estimate_says_what_is_trained_and_flags_win(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for words in ([], ["--batch-size", "1", "--seq-len", "96"], ["--checkpointing", "none"]):
        out = file.with_name("estimate.json")
        assert main(["estimate", "--training-args", str(file), "--json", str(out), *words]) == 0
        peaks.append(json.loads(out.read_text())["peak_bytes"])
    printed = capsys.readouterr().out
    assert f"SFTTrainer of {file.parent / 'model'} as float32 by sft.yaml, 48 tokens in each sample" in printed
    assert "96 tokens in each sample" in printed
    given, longer, kept = peaks
    # Half the samples, twice as long: but for the memory of attention, that is the same.
    assert abs(longer - given) < 2**18 < kept - given


@pytest.mark.e2e
def test_where_it_does_not_fit_the_plan_for_the_same_file_is_named(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", "--training-args", str(file), "--gpu", "0.62GiB", "--check", "--batch-size", "1"]
    assert main([*words, "--dtype", "bfloat16"]) == 1
    expected = f"hf-memopt plan --gpu 0.62GiB --effective-batch 2 --training-args {file} --dtype bfloat16"
    assert capsys.readouterr().out.splitlines()[-1].endswith(expected)


@pytest.mark.e2e
def test_plan_writes_the_file_with_what_it_chooses(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = file.with_name("plan")
    assert main(["plan", "--training-args", str(file), "--gpu", "rtx4090", "--output", str(folder)]) == 0
    written = yaml.safe_load((folder / "sft.yaml").read_text())
    chosen = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "gradient_checkpointing": False}
    assert written == yaml.safe_load(file.read_text()) | argument_file.current_names(chosen)
    command = f"accelerate launch --config_file {folder}/accelerate.yaml -m trl.scripts.sft --config {folder}/sft.yaml"
    assert command in capsys.readouterr().out
    assert yaml.safe_load((folder / "accelerate.yaml").read_text())["mixed_precision"] == "bf16"
