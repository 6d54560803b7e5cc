"""Plans of lerobot's training: its levers, the files, and the command, which is run."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from late_imports import LateModule
from printed_commands import run_in_shell

from hf_memopt.cli import main
from hf_memopt.planning import Job, estimate_peak_memory

pytestmark = [pytest.mark.usefixtures("on_the_cpu")]

policy_toys = LateModule("policy_toys")
workloads = LateModule("hf_memopt.planning.workloads.of_job")

# Copies that a CPU makes, to try a command out.
ON_A_CPU = {"HF_MEMOPT": "cpu_copies=true,offload_threshold_mb=0.01"}
KEPT, ALL = {"activations": "on the device"}, {"activations": "all offloaded"}
CHECKPOINTED, INPUTS = {"activations": "checkpointed"}, {"activations": "checkpointed, inputs offloaded"}


def workload(model: Path, **said: Any) -> Any:
    return workloads.workload_of(Job(str(model), **said))


@pytest.fixture
def pi05(toy_vlm: Path, tmp_path: Path) -> Path:
    path: Path = policy_toys.write_policy(tmp_path / "pi05", "pi05", toy_vlm)
    return path


@pytest.fixture
def smolvla(toy_vlm: Path, toy_dataset: Path, tmp_path: Path) -> Path:
    path: Path = policy_toys.write_run(tmp_path / "smolvla", "smolvla", toy_vlm, toy_dataset)
    return path


@pytest.mark.slow
def test_levers_are_those_that_the_policy_has(pi05: Path, smolvla: Path) -> None:
    kept = ("on the device", "offloaded where free", "all offloaded")
    assert workload(smolvla).levers[0].values == kept
    assert workload(pi05).levers[0].values == (*kept[:2], "checkpointed", "checkpointed, inputs offloaded", kept[2])
    assert (workload(pi05).micro_batches, workload(smolvla, batch_size=6).micro_batches) == ([8], [6])


def test_the_name_says_what_trains(pi05: Path, smolvla: Path) -> None:
    assert (
        workload(smolvla).name
        == f"{smolvla} as smolvla with a camera of 32x32, the expert trained, batches of 2, in lerobot"
    )
    two = workload(pi05, images_per_sample=2, lora_rank=4).name
    assert two == f"{pi05} as pi05 with 2 cameras of 32x32, LoRA of rank 4, batches of 8, in lerobot"
    assert "all but the vision encoder trained" in workload(pi05, freeze_vision_tower=True).name
    assert "all trained" in workload(pi05).name


def test_instructions_are_no_longer_than_the_policy_reads(pi05: Path, toy_vlm: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^seq_len=201: policy type 'pi05' reads at most tokenizer_max_length=200 tok"
    ):
        workload(pi05, seq_len=201)
    with pytest.raises(ValueError, match=r"^seq_len=3: policy type 'act' reads no instructions"):
        workload(policy_toys.write_policy(tmp_path / "act", "act", toy_vlm), seq_len=3)


def test_inputs_are_offloaded_of_checkpointed_blocks_alone(pi05: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^offload='inputs' moves the inputs of checkpointed blocks; use checkpointing"
    ):
        workload(pi05, offload="inputs").as_given()
    workload(pi05, checkpointing="full", offload="inputs").as_given()


@pytest.mark.e2e
def test_checkpointing_lowers_the_peak_and_offloading_fills_the_host(pi05: Path, toy_vlm: Path) -> None:
    with policy_toys.toy_size("pi05", toy_vlm):
        job = workload(pi05, batch_size=64, set=["policy.train_expert_only=true"])
        steps = [job.simulated(settings, 64) for settings in (KEPT, CHECKPOINTED, ALL)]
        kept, checkpointed, offloaded = (estimate_peak_memory(each.setup, each.step) for each in steps)
    assert checkpointed.peak_bytes < 0.8 * kept.peak_bytes
    assert offloaded.host_bytes - kept.host_bytes > 100_000_000


def test_files_and_command_of_a_policy_leave_the_data_to_the_user(pi05: Path, tmp_path: Path) -> None:
    job = workload(pi05, dtype="bfloat16", lora_rank=4)
    written = job.write(INPUTS, 8, tmp_path / "plan")
    assert yaml.safe_load(written[0].read_text())["mixed_precision"] == "bf16"
    chosen = workload(written[1])
    assert (chosen.cfg.policy.gradient_checkpointing, chosen.cfg.policy.dtype) == (True, "bfloat16")
    assert (chosen.cfg.peft.r, chosen.cfg.policy.pretrained_path, chosen.cfg.batch_size) == (4, pi05, 8)
    words = shlex.split(job.command(written))
    assert words[:6] == ["hf-memopt", "launch", "--config_file", str(written[0]), "--offload", "inputs"]
    assert words[6:] == [
        *("--", "-m", "lerobot.scripts.lerobot_train", f"--config_path={written[1]}", "--dataset.repo_id=DATASET")
    ]
    job.write(KEPT, 8, tmp_path / "plan")
    assert shlex.split(job.command(written))[:2] == ["accelerate", "launch"]


@pytest.mark.e2e
def test_an_estimate_says_how_to_plan_what_it_estimated(smolvla: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--set", "policy.train_expert_only=false", "--batch-size", "4", "--gpu", "650MiB"]
    assert main(["estimate", str(smolvla), *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{smolvla} as smolvla with a camera of 32x32, all but the vision encoder trained")
    assert "Confidence: " in printed.out
    assert "got no gradient" not in printed.out
    assert printed.err == ""
    words = shlex.split(printed.out.splitlines()[-1].partition("if there are any: ")[2])
    assert words[1:] == ["plan", "--model", str(smolvla), "--gpu", "650MiB", "--effective-batch", "4", *flags[:2]]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_plan_ends_in_a_command(smolvla: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan"
    assert main(["plan", str(smolvla), "--gpu", "1GiB", "--workers", "1", "--output", str(output)]) == 0
    command = capsys.readouterr().out.splitlines()[-1].strip()
    assert command == workload(smolvla).command([output / "accelerate.yaml", output / "train_config.json"])
    run_in_shell(tmp_path, command, **ON_A_CPU)


@pytest.mark.e2e
@pytest.mark.parametrize("case", ["smolvla, LoRA, offloaded", "act, offloaded", "diffusion, checkpointed"])
@pytest.mark.sweep(share=0.3)
def test_the_command_runs(case: str, toy_teacher: Path, toy_vlm: Path, toy_dataset: Path, tmp_path: Path) -> None:
    kind, *how = case.split(", ")
    settings = ALL if "offloaded" in how else CHECKPOINTED
    if "LoRA" in how:
        job = workload(toy_teacher, lora_rank=4, set=["steps=2", "batch_size=2"])
    else:
        random = {} if kind == "smolvla" else {"pretrained_backbone_weights": None}
        job = workload(policy_toys.write_run(tmp_path, kind, toy_vlm, toy_dataset, **random))
    written = job.write(settings, 2, tmp_path / "plan")
    log = run_in_shell(tmp_path, job.command(written), **ON_A_CPU)
    assert ("moved to the host" in log) == (settings is ALL)
    (last,) = (tmp_path / "outputs").rglob("checkpoints/last/pretrained_model")
    assert (last / ("adapter_model.safetensors" if "LoRA" in how else "model.safetensors")).is_file()
