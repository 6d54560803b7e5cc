"""Tests that `teacher_offload=auto` is decided before step 1 by a plan, or the reason is logged."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_imports import LateModule
from plan_toys import write_student

from hf_memopt.planning import NothingFitsError
from hf_memopt.planning.cards.gpus import DEFAULT_CARD
from hf_memopt.planning.simulation.child_process import IsolatedError
from hf_memopt.units import GIB, MIB

policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
HOME = "hf_memopt.recipes.reflow.workload"
teacher_home = LateModule(HOME)

CARD = replace(DEFAULT_CARD, name="Some Card", memory_bytes=4 * GIB)
PI0 = SimpleNamespace(
    type="pi0_reflow",
    use_reflow=True,
    couplings_path=None,
    has_teacher=True,
    teacher_offload="auto",
    teacher_budget_gib=None,
    device="cuda",
    pretrained_path="student",
)
MEASURED = "teacher_offload=auto: to be decided by what the first two optimizer steps leave; "


@pytest.fixture(scope="module")
def student(toy_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_student(tmp_path_factory.mktemp("student"), toy_vlm)


@pytest.fixture
def run(student: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fields of lerobot's configuration that the decision reads, on a card of 4 GiB."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(f"{HOME}._room", lambda: CARD)
    policy = policy_files.load_config(student)
    policy.pretrained_path, policy.device = student, "cuda"
    return SimpleNamespace(policy=policy, batch_size=2, peft=None, use_policy_training_preset=True)


@pytest.fixture
def decide(caplog: pytest.LogCaptureFixture) -> Callable[[Any], tuple[str, list[tuple[str, str]]]]:
    """A function that returns the home for three batches in an update, and the lines of the log."""

    def decide(run: Any) -> tuple[str, list[tuple[str, str]]]:
        caplog.clear()
        with caplog.at_level("INFO", logger="hf_memopt"):
            home = teacher_home.decided_home(run, 3)
        return home, [(record.levelname, record.getMessage()) for record in caplog.records]

    return decide


@pytest.mark.parametrize(
    "fields",
    [
        {"teacher_offload": "swap"},
        {"teacher_budget_gib": 1.0},
        {"use_reflow": False},
        {"couplings_path": "couplings"},
        {"reflow_target": "self"},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_nothing_is_simulated_where_nothing_is_open(fields: dict[str, Any], run: Any, decide: Any) -> None:
    for name, value in fields.items():
        setattr(run.policy, name, value)
    assert decide(run) == (fields.get("teacher_offload", "auto"), [])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"use_policy_training_preset": False}, "use_policy_training_preset=False: only the policy's own optimizer"),
        ({"peft": object()}, "a student with adapters is not simulated"),
        ({"policy.pretrained_path": None}, "no --policy.path names the student"),
        ({"policy.couplings_seed": 3}, "couplings_seed=3: such a training is not simulated, since its pairs are"),
        ({"policy.activation_offload": "auto"}, "activation_offload='auto': such a training is not simulated"),
        ({"policy": PI0}, "policy type 'pi0_reflow': only smolvla_reflow is simulated"),
    ],
)
def test_a_run_that_is_not_simulated_is_measured(fields: dict[str, Any], reason: str, run: Any, decide: Any) -> None:
    for name, value in fields.items():
        owner, _, field = name.rpartition(".")
        setattr(run.policy if owner else run, field, value)
    home, ((level, line),) = decide(run)
    assert (home, level) == ("auto", "INFO")
    assert line.startswith(MEASURED + reason)


def test_other_devices_and_several_processes_are_measured(
    run: Any, decide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    reason = "of several processes only one would be simulated, without the buckets of their gradients"
    assert decide(run) == ("auto", [("INFO", MEASURED + reason)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run.policy.device = "xpu"
    reason = "device='xpu' is no CUDA device, whose rules a simulation follows"
    assert decide(run) == ("auto", [("INFO", MEASURED + reason)])


def test_what_a_simulation_finds_stops_no_run(run: Any, decide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a card too small for the planner, and errors."""
    monkeypatch.setattr(f"{HOME}._room", lambda: replace(CARD, memory_bytes=MIB))
    home, ((level, line),) = decide(run)
    assert (home, level) == ("auto", "WARNING")
    assert line.startswith(f"{MEASURED}gpu='Some Card': {MIB} bytes are no more than the ")
    for error in (NothingFitsError("no settings fit", SimpleNamespace()), IsolatedError("died\n\nTraceback")):

        def fails(*arguments: object, error: Exception = error, **options: object) -> None:
            raise error

        monkeypatch.setattr(f"{HOME}.plan", fails)
        assert decide(run) == ("auto", [("WARNING", MEASURED + str(error).partition("\n")[0])])


def test_one_line_says_what_was_chosen_and_what_did_not_fit(
    run: Any, decide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(home: str, needed_gib: float, fits: bool) -> Any:
        estimate = SimpleNamespace(peak_bytes=round((needed_gib - 0.75) * GIB))
        return SimpleNamespace(
            settings={"teacher_offload": home}, needed_bytes=round(needed_gib * GIB), fits=fits, estimate=estimate
        )

    def planned(workload: Any, *, gpu: Any, num_workers: int) -> Any:
        assert (workload.micro_batches, workload.effective_batch, gpu, num_workers) == ([2], 6, CARD, 1)
        rows = (row("swap", 3.5, True), row("resident", 4.25, False))
        return SimpleNamespace(best=rows[0], rows=rows, card=gpu)

    monkeypatch.setattr(f"{HOME}.plan", planned)
    line = (
        "teacher_offload=auto: swap, by simulation of a batch of 2: predicted peak 2.75 GiB, needs 3.50 GiB of the "
        "4.00 GiB that Some Card can give; resident needs 4.25 GiB"
    )
    assert decide(run) == ("swap", [("INFO", line)])


@pytest.mark.slow
def test_the_first_home_that_fits_ends_the_search(run: Any, decide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, found = teacher_home.plan, []

    def watched(*arguments: Any, **options: Any) -> Any:
        found.append(plan(*arguments, **options))
        return found[0]

    monkeypatch.setattr(f"{HOME}.plan", watched)
    home, ((level, line),) = decide(run)
    assert (home, level) == ("resident", "INFO")
    assert line.startswith("teacher_offload=auto: resident, by simulation of a batch of 2: predicted peak 0.0")
    assert [row.settings["teacher_offload"] for row in found[0].rows] == ["resident"]
    assert found[0].best.accumulation == 3
