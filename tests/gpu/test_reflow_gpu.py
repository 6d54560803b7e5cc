"""Reflow distillation of SmolVLA on a GPU, bitwise equal wherever teacher and activations are."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_memopt import ActivationOffloader
from hf_memopt.report import read_run
from hf_memopt.weights import TeacherReport


@pytest.fixture(scope="module", autouse=True)
def heavy_imports() -> None:
    """Import slow libraries in the first test, so that collection stays fast."""
    global lerobot_train, PLUGIN, recipe, run, SmolVLAReflowPolicy, train_flags, weights
    from lerobot_runs import PLUGIN, lerobot_train, run, train_flags, weights

    from hf_memopt.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
    from hf_memopt.recipes.reflow_smolvla import main as recipe


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("quick_plans"),
]

# Few Euler steps, and no search for the fastest convolution, whose choice differs from run to run.
FLAGS = ("--policy.teacher_num_steps=2", "--cudnn_deterministic=true")


@dataclass
class Runs:
    """Trainings of one student; `reports` has the teacher's report after each batch of the newest run."""

    student: Path
    dataset: Path
    root: Path
    reports: list[TeacherReport]
    folder: Path = Path()

    def train(self, command: Callable[[], Any], *flags: str, steps: int) -> dict[str, Tensor]:
        self.reports.clear()
        self.folder = self.root / f"run{len(list(self.root.iterdir()))}"
        fixed = train_flags(self.student, self.dataset, self.folder, steps=steps, device="cuda")
        run(command, PLUGIN, *fixed, *FLAGS, *flags)
        assert len(self.reports) == steps
        return weights(self.folder)


@pytest.fixture
def runs(toy_student: Path, toy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    reports: list[TeacherReport] = []
    update = SmolVLAReflowPolicy.update

    def noted(policy: "SmolVLAReflowPolicy") -> None:
        report = policy.teacher.report()
        assert report is not None
        reports.append(report)
        update(policy)

    monkeypatch.setattr(SmolVLAReflowPolicy, "update", noted)
    return Runs(toy_student, toy_dataset, tmp_path, reports)


@pytest.fixture
def offload_activations(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ActivationOffloader]:
    """Return a function that makes later runs offload."""
    forward = SmolVLAReflowPolicy.forward

    def offload(mode: str) -> ActivationOffloader:
        offloader = ActivationOffloader(mode=mode, offload_threshold_mb=0)

        def offloaded(policy: "SmolVLAReflowPolicy", *arguments: Any, **options: Any) -> Any:
            with offloader.offload_context(policy):
                return forward(policy, *arguments, **options)

        monkeypatch.setattr(SmolVLAReflowPolicy, "forward", offloaded)
        return offloader

    return offload


def same(ours: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return ours.keys() == others.keys() and all(torch.equal(ours[name], others[name]) for name in others)


def check_traffic(reports: list[TeacherReport], mode: str) -> None:
    """Check that the teacher is at home on the host, and copied for each batch."""
    assert {(report.mode, report.home) for report in reports} == {(mode, "cpu")}
    copied = [report.bytes_host_to_device for report in reports]
    assert all(before < after for before, after in zip([0, *copied], copied, strict=False))


def test_lerobot_train(runs: Runs, offload_activations: Callable[[str], ActivationOffloader]) -> None:
    want = runs.train(lerobot_train, "--policy.teacher_offload=resident", steps=3)
    assert not same(want, weights(runs.student))
    assert {(report.home, report.bytes_host_to_device) for report in runs.reports} == {("cuda:0", 0)}
    assert same(runs.train(lerobot_train, "--policy.teacher_offload=stream", steps=3), want)
    check_traffic(runs.reports, "stream")
    offloader = offload_activations("all")
    assert same(runs.train(lerobot_train, "--policy.teacher_offload=auto", steps=3), want)
    check_traffic(runs.reports[:2], "stream")
    assert runs.reports[2].mode == "resident"  # after two steps, with room on the device
    assert offloader.stats.bytes_moved > 0


def test_recipe(runs: Runs, offload_activations: Callable[[str], ActivationOffloader]) -> None:
    """Accumulate gradients in bfloat16, with separate prefixes for teacher and student."""
    flags = ("--gradient_accumulation_steps=2", "--policy.dtype=bfloat16", "--policy.share_prefix=off")
    want = runs.train(recipe, *flags, "--policy.teacher_offload=resident", steps=4)
    assert not same(want, weights(runs.student))
    for entry in read_run(runs.folder).timeline:
        peaks = [entry[f"memory/{phase}_peak_gib"] for phase in ("prefix", "teacher", "forward", "backward")]
        assert 0 < peaks[0] <= peaks[1] <= peaks[2] <= peaks[3] == entry["memory/peak_allocated_gib"]
    offloader = offload_activations("auto")
    assert same(runs.train(recipe, *flags, "--policy.teacher_offload=swap", steps=4), want)
    check_traffic(runs.reports, "swap")
    assert offloader.stats.bytes_moved > 0
    assert offloader.stats.predicted_peak_gib is not None  # the last passes followed a plan
