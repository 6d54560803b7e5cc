import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from late_imports import LateModule
from safetensors.torch import load_file
from torch import Tensor

from hf_memopt import recipes
from hf_memopt.training import NonFiniteGradientError

train_sft = LateModule("hf_memopt.recipes.train_sft")
trl = LateModule("trl")
sft_options = LateModule("hf_memopt.recipes.sft.options")
sft_plan = LateModule("hf_memopt.recipes.sft.workload")
model_levers = LateModule("hf_memopt.planning.workloads.model_levers")
trainer_fields = LateModule("hf_memopt.planning.workloads.trainer_fields")

pytestmark = [pytest.mark.usefixtures("quick_plans", "on_the_cpu", "no_shared_cache"), pytest.mark.e2e]

RECIPES = Path(recipes.__file__).parent
TINY = ("--max_steps=3", "--logging_steps=1", "--learning_rate=0.01", "--per_device_train_batch_size=4")
OFFLOADED = ("--cpu_copies", "--offload_threshold_mb=0")
LORA = "--lora_rank=4"
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def train(folder: Path, *flags: str) -> tuple[list[float], dict[str, Tensor]]:
    log = train_sft.main([*TINY, *flags, f"--output_dir={folder}"])
    name = "adapter_model" if (folder / "adapter_model.safetensors").exists() else "model"
    return [entry["loss"] for entry in log if "loss" in entry], load_file(folder / f"{name}.safetensors")


KINDS = {
    "full": (),
    "lora": (LORA, "--gradient_checkpointing=false"),
    "bf16": (LORA, "--bf16=true"),
    "int8": (LORA, "--quantize=int8-torchao"),
    "nf4": (LORA, "--quantize=nf4", "--gradient_checkpointing=false"),
}


@pytest.mark.parametrize(
    "kind", [kind if kind != "nf4" else pytest.param("nf4", marks=needs_bitsandbytes) for kind in KINDS]
)
def test_losses_and_weights_are_bitwise_those_without_offloading(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses, weights = train(tmp_path / "plain", *KINDS[kind], "--offload=off", "--no_memory_log")
    caplog.set_level(logging.INFO, "hf_memopt")
    offloaded, same_weights = train(tmp_path / "auto", *KINDS[kind], *OFFLOADED)
    assert len(losses) == 3
    assert offloaded == losses
    assert same_weights.keys() == weights.keys()
    assert all(torch.equal(same_weights[name], weights[name]) for name in weights)
    assert "moved to the host" in caplog.text
    assert (tmp_path / "auto" / "memory.jsonl").exists()
    assert not (tmp_path / "plain" / "memory.jsonl").exists()
    card = (tmp_path / "auto" / "README.md").read_text()
    assert "| update | 1 x 4 samples |" in card
    assert " moved to the host" in card
    assert "Memory and time" not in (tmp_path / "plain" / "README.md").read_text()


@pytest.mark.parametrize("kind", ["lora", "bf16", "int8", pytest.param("nf4", marks=needs_bitsandbytes)])
def test_adapters_on_a_streamed_base_are_bitwise_those_of_a_resident_one(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses, weights = train(tmp_path / "plain", *KINDS[kind], "--offload=off")
    caplog.set_level(logging.INFO, "hf_memopt")
    streamed, same_weights = train(tmp_path / "streamed", *KINDS[kind], *OFFLOADED, "--base=file")
    assert streamed == losses
    assert same_weights.keys() == weights.keys()
    assert all(torch.equal(same_weights[name], weights[name]) for name in weights)
    assert "stream from their files to cpu" in caplog.text
    assert "moved to the host" in caplog.text


def test_an_optimizers_home_changes_no_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses, weights = train(tmp_path / "plain", "--offload=off")
    caplog.set_level(logging.INFO, "hf_memopt")
    same_losses, same_weights = train(tmp_path / "away", "--offload=off", "--optimizer_home=file", f"--disk={tmp_path}")
    assert same_losses == losses
    assert all(torch.equal(same_weights[name], weights[name]) for name in weights)
    assert f"disk={tmp_path}" in caplog.text


def test_the_loss_is_on_the_assistants_words_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[Tensor] = []
    compute_loss = trl.SFTTrainer.compute_loss

    def keep(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels.append(inputs["labels"].clone())
        return compute_loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(trl.SFTTrainer, "compute_loss", keep)
    train(tmp_path / "answers")
    train(tmp_path / "all", "--assistant_only_loss=false")
    answers, everything = ((torch.cat([each.flatten() for each in part]) >= 0) for part in (labels[:3], labels[3:]))
    # 12 of the 26 words in a conversation are the assistant's: 7 and 5, with their end tokens.
    assert answers.sum() == 3 * 4 * 12
    assert everything.sum() == 3 * 4 * 26


def test_rows_of_prompts_and_completions_from_a_folder(tmp_path: Path) -> None:
    rows = [{"prompt": f"what is {i} plus 1 ?", "completion": f" {i + 1} ."} for i in range(12)]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses, _ = train(tmp_path / "run", f"--dataset={tmp_path / 'rows'}")
    assert len(losses) == 3


def test_what_a_plan_chooses_reaches_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = SimpleNamespace(settings={"activations": "checkpointed, inputs offloaded"}, micro_batch=2)
    monkeypatch.setattr("hf_memopt.recipes.sft.workload.best_row", lambda model, card, process: best)
    flags = ("--plan=8GiB", "--per_device_train_batch_size=4", "--gradient_accumulation_steps=3")
    options = sft_options.parse("", [LORA, *flags, f"--model={tiny(tmp_path)}"])
    assert sft_plan.apply_plan(options) is best
    training = options.training
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 6)
    assert (training.gradient_checkpointing, options.memopt.offload) == (True, "inputs")


@pytest.mark.parametrize(
    ("flags", "home", "budget"),
    [
        ((), "off", None),
        (("--base=auto",), "host", None),
        (("--base=file", "--base_budget_gib=2"), "file", "2.0GiB"),
    ],
)
def test_a_plan_has_the_home_of_the_base_and_all_choices(
    flags: tuple[str, ...], home: str, budget: str | None, tmp_path: Path
) -> None:
    options = sft_options.parse("", [LORA, *flags, f"--model={tiny(tmp_path)}", "--max_length=64"])
    workload = sft_plan.SupervisedFineTuning(options, {})
    assert (workload.given.options.home, workload.given.options.base_budget) == (home, budget)
    choices = {lever.name: lever.values for lever in workload.levers}
    assert choices.pop("activations") == tuple(model_levers.ACTIVATIONS)
    assert choices == ({} if home == "off" else {"base": (home,)})


def test_a_card_with_room_for_the_whole_batch_needs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_memopt")
    losses, _ = train(tmp_path, LORA, "--plan=80GiB", "--max_length=64")
    assert len(losses) == 3
    assert "Plan: " in caplog.text
    assert "micro-batch 4 x 1, activations on the device" in caplog.text
    assert "activation offloading: off" in caplog.text
    assert "Plan: predicted peak" in caplog.text


def tiny(folder: Path) -> str:
    return train_sft.write_tiny_model(folder / "tiny", 0)


def test_a_plan_from_a_file_writes_one_that_runs(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump({"max_steps": 1, "lora_rank": 4, "budget_gib": 1.0, "max_length": 64}))
    found = sft_plan.workload(file, effective_batch=4)
    (settings,) = ({"activations": value} for value in found.levers[0].values if value == "all offloaded")
    written = found.write(settings, 2, tmp_path)
    assert f"-m hf_memopt.recipes.train_sft --config {file}" in found.command(written)
    options = sft_options.parse("", ["--config", str(file)])
    assert options.memopt.offload == "all"
    assert options.memopt.budget_gib is None
    training = options.training
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 2)
    assert found.simulated(settings, 2).num_micro_batches == 2


def test_training_that_diverges_stops(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteGradientError, match=r"Non-finite gradient at step 2\."):
        train(tmp_path, "--learning_rate=1e25", "--lr_scheduler_type=constant", "--max_grad_norm=0", "--save_steps=1")
    assert not (tmp_path / "model.safetensors").exists()
    assert all(value.isfinite().all() for value in load_file(tmp_path / "checkpoint-1" / "model.safetensors").values())


def test_a_run_is_not_overwritten_and_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    whole, weights = train(tmp_path / "whole", "--save_steps=2")
    train(tmp_path / "parted", "--save_steps=2")
    (tmp_path / "parted" / "checkpoint-3").rename(tmp_path / "away")
    with pytest.raises(ValueError, match="already holds checkpoint-2"):
        train(tmp_path / "parted")
    losses, same_weights = train(tmp_path / "parted", "--resume_from_checkpoint=latest", *OFFLOADED)
    assert losses == whole
    assert all(torch.equal(same_weights[name], weights[name]) for name in weights)


REFUSED = {
    ("--base=file",): "base='file' streams frozen weights, and all of them learn; add --lora_rank",
    ("--quantize=nf4",): "a base in few bits is frozen, so that adapters have to learn; add --lora_rank",
    ("--lora_rank=0",): "--lora-rank: 0 must be at least 1",
    ("--plan=x",): "plan='x': ",
    ("--plan=auto",): "plan='auto' needs an accelerator",
    ("--plan=8GiB", "--budget_gib=1"): "plan='8GiB' chooses what is offloaded; leave --budget_gib=1.0 out",
    ("--plan=8GiB", "--optim=lomo"): "optim='lomo' is not simulated; choose from adamw_torch_fused",
    ("--model=/nowhere",): "model='/nowhere' cannot be loaded",
    ("--dataset=/nowhere",): "dataset='/nowhere' cannot be loaded",
    ("--dataset=pandas",): "dataset='pandas' cannot be loaded: a loader of the datasets library",
    ("--budget_gib=1", "--offload=all"): "budget_gib=1.0 needs offload=auto",
    ("--resume_from_checkpoint=/nowhere",): "resume_from_checkpoint='/nowhere': no such folder",
    ("--resume_from_checkpoint=latest",): "resume_from_checkpoint='latest': no such folder",
}


@pytest.mark.parametrize("flags", REFUSED, ids=lambda flags: flags[0])
def test_mistakes_name_flag_and_remedy(flags: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^") as caught:
        train(tmp_path / "run", *flags)
    assert REFUSED[flags] in str(caught.value)


def test_rows_that_are_no_conversations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="has the columns text; rows need `messages`, or `prompt` and `completion`"):
        train(tmp_path / "run", f"--dataset={tmp_path}")


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memopt.recipes.sft.model.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"weights in few bits by bitsandbytes need it: pip install bitsandbytes$"):
        train(tmp_path / "run", LORA, "--quantize=nf4")


@pytest.mark.parametrize("how", ["none", "nf4", "nf4-double", "int8-llm", "int8-torchao"])
def test_quantisations_have_the_names_of_plans(how: str, tmp_path: Path) -> None:
    options = sft_options.parse("", [LORA, f"--quantize={how}", f"--model={tiny(tmp_path)}", "--max_length=64"])
    assert options.is_quantised == (how != "none")
    assert sft_plan.SupervisedFineTuning(options, {}).given.options.quantize == how


def test_the_older_name_of_torchaos_weights_means_them(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("quantize: int8\n")
    for words in (["--quantize=int8"], ["--config", str(tmp_path / "sft.yaml")]):
        with pytest.warns(FutureWarning, match="quantize=int8 is now spelled quantize=int8-torchao"):
            options = sft_options.parse("", [LORA, *words])
        assert options.sft.quantize == "int8-torchao"
        assert not options.model.load_in_8bit


def test_every_optimizer_that_is_planned_is_one_of_trainers() -> None:
    from transformers.training_args import OptimizerNames

    assert set(trainer_fields.OPTIMIZERS) <= {each.value for each in OptimizerNames}


def test_the_recipe_is_short() -> None:
    assert len((RECIPES / "train_sft.py").read_text().splitlines()) <= 140


def test_the_demo_learns_and_reports_through_accelerate_launch(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1"]
    flags = ["--config", "recipes/configs/sft_demo.yaml", f"--output_dir={tmp_path}", "--max_steps=60"]
    command = [*launch, "-m", "hf_memopt.recipes.train_sft", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    assert (tmp_path / "report" / "report.html").exists()
    assert "moved to the host" in done.stdout + done.stderr
