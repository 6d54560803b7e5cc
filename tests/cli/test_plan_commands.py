"""Commands that plans print, run at toy size: those of each setting of a causal model, of other tasks, of recipes."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import denoiser_toys
import pytest
import torch
import transformers_toys
import yaml
from late_imports import LateModule
from printed_commands import APART, run_printed
from safetensors.torch import load_file

from hf_memopt.cli import main

conversations = LateModule("hf_memopt.recipes.sft.model")
transformers = LateModule("transformers")

pytestmark = pytest.mark.e2e
# What a user adds: two updates, and copies without a device.
SHORT = {"max_steps": 2, "save_strategy": "no", "cpu_copies": True, "logging_steps": 1}
LORA: dict[str, Any] = {"lora_rank": 4}
HOST_BASE, FILE_BASE = LORA | {"base": "host"}, LORA | {"base": "file"}
# Options of a plan, and the activations that it chose.
CHOSEN: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({}, "on the device"),
    "bfloat16": ({"dtype": "bfloat16"}, "checkpointed"),
    "autocast": ({"precision": "bf16"}, "offloaded where free"),
    "sdpa, no clipping": ({"attention": "sdpa", "max_grad_norm": "none"}, "all offloaded"),
    "foreach": ({"optimizer": "adamw-foreach"}, "checkpointed, inputs offloaded"),
    "sgd, selective": ({"optimizer": "sgd"}, "selectively checkpointed"),
    "adafactor": ({"optimizer": "adafactor"}, "on the device"),
    "8 bits": ({"optimizer": "adamw-8bit"}, "on the device"),
    "4 bits": ({"optimizer": "adamw-4bit"}, "on the device"),
    "lora": (LORA, "on the device"),
    "lora, checkpointed": (LORA, "checkpointed"),
    "lora, offloaded": (LORA | {"lora_targets": "q_proj,v_proj"}, "all offloaded"),
    "lora, inputs offloaded": (LORA, "checkpointed, inputs offloaded"),
    "dora": (LORA | {"use_dora": True}, "on the device"),
    "base on the host": (HOST_BASE, "on the device"),
    "base in its file": (FILE_BASE | {"base_budget": "0.001GiB"}, "checkpointed"),
    "int8 of torchao": (LORA | {"quantize": "int8-torchao"}, "on the device"),
}
# With bitsandbytes, which `make setup` puts apart.
OF_BITSANDBYTES = {name: (LORA | {"quantize": name}, "on the device") for name in ("nf4", "nf4-double", "int8-llm")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    conversations.write_tiny_model(folder, seed=0)
    return folder


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write where the command is run, as it names its files."""
    monkeypatch.chdir(tmp_path)


def short(fields: Path) -> None:
    fields.write_text(fields.read_text() + yaml.safe_dump(SHORT))


def check_saved(folder: Path, fields: dict[str, Any]) -> None:
    (saved,) = folder.glob("*model.safetensors")
    assert all(bool(weight.isfinite().all()) for weight in load_file(saved).values())
    assert saved.name == ("adapter_model.safetensors" if fields.get("use_peft") else "model.safetensors")


def check_recipe(model: Path, options: dict[str, Any], activations: str, path: str = "") -> dict[str, Any]:
    """Run the command for a choice, with a folder of libraries in `path`; return the fields of its file."""
    planned = transformers_toys.workload_of(str(model), seq_len=32, effective_batch=4, **options)
    chosen = {lever.name: lever.values[0] for lever in planned.levers} | {"activations": activations}
    written = planned.write(chosen, 2, Path())
    short(written[1])
    run_printed(shlex.split(planned.command(written)), path)
    fields: dict[str, Any] = yaml.safe_load(written[1].read_text())
    check_saved(Path("outputs/sft"), fields)
    return fields


@pytest.mark.sweep(share=0.1)
@pytest.mark.parametrize("name", CHOSEN)
def test_the_recipe_trains_with_what_a_plan_has_chosen(name: str, model: Path) -> None:
    fields = check_recipe(model, *CHOSEN[name])
    assert (fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]) == (2, 2)


@pytest.mark.skipif(not APART.exists(), reason="make setup puts bitsandbytes there")
@pytest.mark.parametrize("name", OF_BITSANDBYTES)
@pytest.mark.sweep(share=0.3)
def test_the_recipe_trains_adapters_on_weights_of_bitsandbytes(name: str, model: Path) -> None:
    fields = check_recipe(model, *OF_BITSANDBYTES[name], path=str(APART))
    assert fields["load_in_8bit"] == (name == "int8-llm")


def test_a_model_without_a_chat_template_learns_completions(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template.jinja"))
    check_recipe(tmp_path / "plain", LORA, "on the device")


@pytest.mark.parametrize("output", [[], ["--output", "chosen"]], ids=["by itself", "named"])
@pytest.mark.sweep(share=0.5)
def test_what_plan_prints_runs_as_it_stands(output: list[str], model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(model), "--seq-len", "32", "--gpu", "8GiB", "--effective-batch", "4", "--workers", "1"]
    assert main([*words, "--lora-rank", "4", *output]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:2] == ["accelerate", "launch"]
    folder = Path("chosen" if output else "plans/model")
    assert command[-1] == str(folder / "sft.yaml")
    short(folder / "sft.yaml")
    launch = [sys.executable, "-m", "accelerate.commands.launch", *command[2:]]
    done = subprocess.run(launch, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    check_saved(Path("outputs/sft"), yaml.safe_load((folder / "sft.yaml").read_text()))


# Model type, task, class to load it with, options, and activations.
TASKS: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "masked": ("bert", "masked", "AutoModelForMaskedLM", {"precision": "bf16"}, "on the device"),
    "seq2seq": ("t5", "seq2seq", "AutoModelForSeq2SeqLM", {"optimizer": "adafactor"}, "checkpointed"),
    "images": ("vit", "image-classification", "AutoModelForImageClassification", {}, "checkpointed, inputs offloaded"),
    "sequences": (
        *("bert", "sequence-classification", "AutoModelForSequenceClassification"),
        {"dtype": "bfloat16", "max_grad_norm": "none"},
        "all offloaded",
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_scripts_that_read_training_arguments_run_with_the_printed_flags(name: str, tmp_path: Path) -> None:
    model_type, task, kind, options, activations = TASKS[name]
    folder = transformers_toys.write_config(tmp_path / "model", model_type)
    planned = transformers_toys.workload_of(folder, seq_len=16, effective_batch=4, task=task, **options)
    run = planned.given.options
    getattr(transformers, kind).from_config(run.config).save_pretrained(folder)
    batch = run.batch(run.config, 8)
    rows = [{field: values[row] for field, values in batch.items()} for row in range(8)]
    torch.save((folder, kind, getattr(torch, run.dtype), rows), tmp_path / "rows.pt")
    shutil.copy(Path(transformers_toys.__file__).with_name("example_script.py"), tmp_path / "train.py")
    written = planned.write({"activations": activations}, 2, tmp_path)
    # Trainer refuses --bf16 on a machine without a GPU, unless it is told that there is none.
    run_printed([*shlex.split(planned.command(written)), "--use_cpu", "True"], HF_MEMOPT="cpu_copies=True")
    check_saved(tmp_path / "trained", {})


def test_scripts_of_denoisers_run_with_the_printed_flags(tmp_path: Path) -> None:
    folder = denoiser_toys.write_denoiser(tmp_path / "denoiser", "unet")
    planned = transformers_toys.workload_of(folder, effective_batch=4, precision="bf16")
    shutil.copy(Path(denoiser_toys.__file__).with_name("denoising_script.py"), tmp_path / "train.py")
    written = planned.write({"activations": "checkpointed"}, 2, tmp_path)
    run_printed(shlex.split(planned.command(written)))
    assert (tmp_path / "trained" / "diffusion_pytorch_model.safetensors").is_file()
