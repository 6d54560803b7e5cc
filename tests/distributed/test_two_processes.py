"""Tests that two processes on the CPU train one student together."""

from pathlib import Path

import pytest
import torch
from late_imports import LateModule
from ranks import torchrun
from safetensors.torch import load_file

reflow_smolvla = LateModule("hf_memopt.recipes.reflow_smolvla")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")
lerobot_runs = LateModule("lerobot_runs")


FOLDER = Path(__file__).parent


@pytest.mark.slow  # two processes import lerobot; test_training_two_processes.py checks plain models
def test_two_processes_train_as_one(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare two ranks, each with two micro-batches of one frame, with one process and four frames."""
    flags = lerobot_runs.train_flags(toy_student, toy_dataset, tmp_path / "run", steps=4, batch_size=1)
    output = torchrun(
        str(FOLDER / "one_rank.py"),
        str(tmp_path),
        *flags,
        *lerobot_runs.PLAIN_SGD,
        "--gradient_accumulation_steps=2",
        "--policy.teacher_offload=swap",
    )
    first, second = (load_file(tmp_path / f"rank{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert output.count("Start offline training") == 1

    saved = lerobot_runs.weights(tmp_path / "run")
    assert all(torch.equal(saved[name], first[name]) for name in first)
    modeling_smolvla.SmolVLAPolicy.from_pretrained(
        tmp_path / "run" / "checkpoints" / "last" / "pretrained_model", strict=True
    )

    lerobot_runs.pin_draws(monkeypatch)
    lerobot_runs.run(
        reflow_smolvla.main,
        *lerobot_runs.train_flags(toy_student, toy_dataset, tmp_path / "one", steps=2, batch_size=4),
        *lerobot_runs.PLAIN_SGD,
    )
    before, alone = lerobot_runs.weights(toy_student), lerobot_runs.weights(tmp_path / "one")
    name = "model.action_out_proj.weight"
    assert (alone[name] - before[name]).abs().max() > 1e-3
    for name, expected in alone.items():
        torch.testing.assert_close(saved[name], expected, rtol=0, atol=1e-5)
