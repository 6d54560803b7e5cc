import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import accelerators
import pytest
import torch
from accelerate import Accelerator
from late_imports import LateModule
from patience import HANG_S
from recipe_flags import CAUSAL_LM as TINY
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_memopt import detect_leaks
from hf_memopt.checkpoint import endless_batches
from hf_memopt.recipes.causal_lm.options import parse
from hf_memopt.report import read_run
from hf_memopt.training import NonFiniteGradientError

causal_lm_data = LateModule("hf_memopt.recipes.causal_lm.data")
datasets = LateModule("datasets")
train_causal_lm = LateModule("hf_memopt.recipes.train_causal_lm")
transformers = LateModule("transformers")

pytestmark = [pytest.mark.usefixtures("quick_plans", "on_the_cpu", "no_shared_cache"), pytest.mark.e2e]

ROOT = Path(__file__).parents[2]

ACCUMULATED = (*TINY, "--gradient_accumulation_steps=4")


def train(folder: Path, *flags: str) -> dict[str, Any]:
    return train_causal_lm.main([*flags, f"--output_dir={folder}"])


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without offloading, with accumulation, dropout and a checkpoint on the way."""
    folder = tmp_path_factory.mktemp("plain")
    with accelerators.on_the_cpu():
        train(folder, *ACCUMULATED, "--offload=off", "--checkpointing_steps=6")
    return folder


def test_the_model_learns_and_can_be_loaded_again(plain: Path) -> None:
    results = json.loads((plain / "results.json").read_text())
    first, last = [entry for entry in results["history"] if "eval_loss" in entry]
    assert (first["update"], last["update"]) == (5, 10)
    assert last["eval_loss"] < first["eval_loss"] - 0.1
    assert last["perplexity"] == pytest.approx(math.exp(last["eval_loss"]))
    assert results["final"] == last
    assert (plain / "results.png").stat().st_size > 10_000
    assert [entry["step"] for entry in read_run(plain).timeline] == [5, 10]
    model, tokenizer = (
        transformers.AutoModelForCausalLM.from_pretrained(plain),
        transformers.AutoTokenizer.from_pretrained(plain),
    )
    text = "unless required by applicable law"
    tokens = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(tokens[0]) == text
    assert model(tokens, labels=tokens).loss < math.log(300)


@pytest.mark.parametrize(
    "flags",
    [
        ("--offload=all",),
        ("--offload=auto", "--budget_gib=0.0005"),
        ("--offload=auto", "--max_slowdown=1"),
    ],
    ids=["all", "budget", "slowdown"],
)
def test_offloading_changes_no_bit_of_the_weights(flags: tuple[str, ...], plain: Path, tmp_path: Path) -> None:
    results = train(tmp_path, *ACCUMULATED, "--cpu_copies", *flags)
    assert results["training_cost"].moved_mib > 0.1
    assert equal(weights(tmp_path), weights(plain))


def test_offloading_the_inputs_of_checkpointed_blocks_changes_no_bit(plain: Path, tmp_path: Path) -> None:
    results = train(tmp_path, *ACCUMULATED, "--cpu_copies", "--offload=inputs", "--gradient_checkpointing")
    assert results["training_cost"].moved_mib > 0
    assert equal(weights(tmp_path), weights(plain))


def test_an_optimizers_home_changes_no_bit(plain: Path, tmp_path: Path) -> None:
    home = ("--optimizer_home=file", f"--disk={tmp_path}")
    results = train(tmp_path / "run", *ACCUMULATED, "--offload=off", *home)
    assert equal(weights(tmp_path / "run"), weights(plain))
    report = json.loads((tmp_path / "run" / "results.json").read_text())["optimizer"]
    assert report["bytes_written"] > report["bytes_read"] > 0
    offloading = read_run(tmp_path / "run").offloading
    assert offloading is not None
    assert offloading.weights == [str(results["optimizer"])]


def test_another_seed_gives_other_weights(plain: Path, tmp_path: Path) -> None:
    train(tmp_path, *ACCUMULATED, "--offload=off", "--seed=1")
    assert not equal(weights(tmp_path), weights(plain))


def test_every_update_is_made_of_equally_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[Tensor] = []
    at_updates: list[int] = []
    backward = Accelerator.backward
    monkeypatch.setattr(Accelerator, "backward", lambda self, loss: (batches.append(loss), backward(self, loss)))
    handle = register_optimizer_step_post_hook(lambda *_: at_updates.append(len(batches)))
    results = train(tmp_path, *ACCUMULATED, "--offload=off", "--eval_every=10")
    handle.remove()
    assert at_updates == list(range(4, 44, 4))
    logged = [entry["loss"] for entry in results["history"] if "loss" in entry]
    assert logged == pytest.approx([torch.stack(batches[end - 4 : end]).mean().item() for end in (20, 40)])


def test_training_that_diverges_stops_and_leaves_what_was_good(tmp_path: Path) -> None:
    with pytest.raises(
        NonFiniteGradientError, match=r"Non-finite gradient at step 3\. .*\n  rank 0, micro-batch 1: model\."
    ):
        train(tmp_path, *ACCUMULATED, "--learning_rate=1e25", "--offload=off")
    assert not (tmp_path / "model.safetensors").exists()
    assert all(value.isfinite().all() for value in weights(tmp_path / "checkpoints" / "step-000002").values())


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain / "checkpoints", tmp_path / "checkpoints")
    flags = ("--offload=all", "--cpu_copies", "--resume_from_checkpoint=latest")
    resumed = train(tmp_path, *ACCUMULATED, *flags)
    assert equal(weights(tmp_path), weights(plain))
    assert resumed["history"] == json.loads((plain / "results.json").read_text())["history"]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state = Accelerator.save_state

    def full_disk(accelerator: Accelerator, folder: str, **settings: Any) -> None:
        save_state(accelerator, folder, **settings)
        if "step-000004" in folder:
            raise OSError("No space left on device")

    monkeypatch.setattr(Accelerator, "save_state", full_disk)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path, *TINY, "--offload=off", "--checkpointing_steps=2")
    monkeypatch.undo()
    results = train(tmp_path, *TINY, "--offload=off", "--max_steps=3", "--resume_from_checkpoint=latest")
    assert results["history"][-1]["update"] == 3  # two updates before the checkpoint, and one after it


@pytest.mark.parametrize("batch", [25, 40])
def test_a_run_that_is_told_to_stop_saves_and_goes_on_later(
    batch: int, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop inside an update, and in the last update, after which only the model is to be saved."""
    batches = iter(range(1, 1000))
    backward = Accelerator.backward

    def told_to_stop(accelerator: Accelerator, loss: Tensor) -> None:
        if next(batches) == batch:
            os.kill(os.getpid(), signal.SIGTERM)
        backward(accelerator, loss)

    monkeypatch.setattr(Accelerator, "backward", told_to_stop)
    with pytest.raises(SystemExit, match="143"):
        train(tmp_path, *ACCUMULATED, "--offload=off")
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(ValueError, match=r"already holds checkpoints.latest; go on with"):
        train(tmp_path, *ACCUMULATED)
    accelerators.forget_accelerator()
    results = train(tmp_path, *ACCUMULATED, "--offload=off", "--resume_from_checkpoint=latest")
    assert equal(weights(tmp_path), weights(plain))
    assert (results["training_cost"].step_ms is None) == (batch == 40)


@pytest.mark.slow
def test_a_process_ends_with_the_status_of_its_signal(tmp_path: Path) -> None:
    flags = (*TINY, "--offload=off", "--max_steps=100000", "--checkpointing_steps=5", f"--output_dir={tmp_path}")
    process = subprocess.Popen([sys.executable, "-m", "hf_memopt.recipes.train_causal_lm", *flags])
    latest = tmp_path / "checkpoints" / "latest"
    while not latest.exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=HANG_S) == 143
    num_updates = int(latest.read_text().split()[0].removeprefix("step-"))
    results = train(
        tmp_path, *TINY, "--offload=off", f"--max_steps={num_updates + 1}", "--resume_from_checkpoint=latest"
    )
    assert results["final"]["update"] == num_updates + 1


def test_text_of_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    sentences = (ROOT / "LICENSE").read_text().split(".")
    datasets.Dataset.from_dict({"sentence": sentences, "length": [len(text) for text in sentences]}).to_json(
        tmp_path / "data" / "train.jsonl"
    )
    flags = [flag for flag in TINY if "text_file" not in flag]
    results = train(
        tmp_path / "run", *flags, f"--dataset={tmp_path / 'data'}", "--text_column=sentence", "--max_steps=1"
    )
    assert results["final"]["eval_loss"] > 0
    with pytest.raises(ValueError, match=r"text_column='text' is not in .*choose from \['sentence', 'length'\]"):
        train(tmp_path / "other", *flags, f"--dataset={tmp_path / 'data'}")


def test_a_run_that_offloads_nothing_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = (*TINY, "--max_steps=1")
    reasons = {
        ("--offload=off",): "off (--offload off)",
        ("--offload=all",): "NOTHING WILL BE OFFLOADED. The model runs on the CPU",
        ("--offload=all", "--cpu_copies", "--offload_threshold_mb=9"): "no saved storage of --offload_threshold_mb=9",
    }
    for number, (chosen, reason) in enumerate(reasons.items()):
        caplog.clear()
        with caplog.at_level(logging.INFO, "hf_memopt"):
            train(tmp_path / str(number), *flags, *chosen)
        assert [other for other in reasons.values() if other in caplog.text] == [reason]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text_file=missing.txt"], r"text_file='missing.txt' cannot be read"),
        ([f"--text_file={sys.executable}"], r"text_file=.* cannot be read as UTF-8"),
        (["--dataset=missing/dataset"], r"dataset='missing/dataset' cannot be loaded"),
        (["--dataset=pandas"], r"dataset='pandas' cannot be loaded: a loader of the datasets library"),
        (["--dataset=x", "--text_file=y"], "exclude each other"),
        (["--model=missing/model"], r"='missing/model' cannot be loaded"),
        (["--config_overrides=hidden=3"], "qwen3 has no setting 'hidden'"),
        (["--config_overrides=hidden_size"], "not of the form name=value"),
        (["--model_type=qwen33"], "qwen33"),
        (["--block_size=65"], "block_size=65 is longer than the model's max_position_embeddings=64"),
        (["--block_size=4000"], "block_size=4000: the text gives"),
        (["--per_device_batch_size=900"], "per_device_batch_size=900: a batch of all processes needs 900"),
        (["--budget_gib=1", "--offload=all"], "budget_gib=1.0 needs --offload auto"),
        (["--budget_gib=0.000001", "--offload=auto", "--cpu_copies"], r"budget_gib=0\.0000 is too small"),
        (["--offload=inputs"], "add --gradient_checkpointing"),
        (["--config_overrides=num_attention_heads=0"], "num_attention_heads=0 must be at least 1"),
        (["--config_overrides=hidden_size=-8"], "hidden_size=-8 must be at least 1"),
        (["--config_overrides=hidden_size=1.5"], "transformers cannot build a model from this configuration"),
        (["--config_overrides=hidden_act=nope"], "transformers cannot build a model from this configuration"),
        (["--resume_from_checkpoint=latest"], r"resume_from_checkpoint='latest': .* there is no valid checkpoint"),
        (["--resume_from_checkpoint=other"], "resume_from_checkpoint='other': checkpoint 'other': no such folder"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path, *(() if flags[0].startswith(("--text_file", "--dataset")) else TINY), *flags)


def test_a_folder_in_use_is_refused(plain: Path) -> None:
    with pytest.raises(ValueError, match=r"already holds results.json; go on with --resume_from_checkpoint latest"):
        train(plain, *TINY)


def test_accelerate_launch_with_flags_from_a_file(tmp_path: Path) -> None:
    launch = ["--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=bf16", "--dynamo_backend=no"]
    demo = Path(__file__).parents[2] / "recipes" / "configs" / "causal_lm_demo.yaml"
    script = ["-m", "hf_memopt.recipes.train_causal_lm", f"--config_path={demo}", *TINY, f"--output_dir={tmp_path}"]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *launch,
        *script,
        "--max_steps=2",
        "--report_to=tensorboard",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["mixed_precision"] == "bf16"
    assert results["training_cost"]["mode"] == "auto"
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("mode", [pytest.param("off", marks=pytest.mark.slow), "auto"])
def test_training_leaks_nothing(mode: str, tmp_path: Path) -> None:
    options = parse(None, [*TINY, f"--offload={mode}", "--cpu_copies", f"--output_dir={tmp_path}"])
    texts = causal_lm_data.read_texts(options.data)
    tokenizer = causal_lm_data.make_tokenizer(options.model, texts)
    blocks = causal_lm_data.pack(texts, tokenizer, options.data, options.training.seed)
    run = train_causal_lm.prepare(train_causal_lm.make_accelerator(options), options, tokenizer, blocks)
    batches = endless_batches(run.accelerator, run.batches)
    leaks = detect_leaks(lambda: train_causal_lm.update(run, batches), num_steps=24)
    assert not leaks.leaking, str(leaks)
