"""Tests of a π0 and a π0.5 by both libraries' commands, from stock training to a student that stock lerobot loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule

known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
processors = LateModule("hf_memopt.lerobot.files.checkpoint_files")
precompute_pairs = LateModule("hf_memopt.lerobot.precompute_pairs")
diagnosis = LateModule("hf_memopt.lerobot.student.diagnosis")
model_card = LateModule("hf_memopt.lerobot.student.model_card")
prepare = LateModule("hf_memopt.lerobot.student.prepare")
reflow_recipe = LateModule("hf_memopt.recipes.reflow_smolvla")
smolvla_toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
policies = LateModule("lerobot.policies")
lerobot_runs = LateModule("lerobot_runs")
pi0_toys = LateModule("pi0_toys")

pytestmark = pytest.mark.usefixtures("toy_pi")

FROZEN = "--policy.train_expert_only=true"
# Of a token or a condition that only this policy's expert has.
PROJECTIONS = {"pi0": "state_proj", "pi05": "time_mlp_in"}
TITLES = {"pi0": "π0", "pi05": "π0.5"}


@pytest.fixture(scope="module")
def pi_student(pi: str, toy_vlm: Path, pi_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an untrained student. Read only."""
    with pi0_toys.toy_sizes(toy_vlm, pi):
        return prepare.prepare_student(str(pi_teacher), tmp_path_factory.mktemp(pi) / "student")


@pytest.fixture(scope="module")
def trained(
    pi: str, toy_vlm: Path, pi_student: Path, toy_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Folder and log of two steps in lerobot's own loop. Read only."""
    output = tmp_path_factory.mktemp(pi) / "run"
    flags = lerobot_runs.train_flags(pi_student, toy_dataset, output, steps=2)
    more = (FROZEN, "--policy.teacher_offload=swap", "--policy.reflow_real_data=0.5", "--dataset.eval_split=0.25")
    with pi0_toys.toy_sizes(toy_vlm, pi):
        return output, lerobot_runs.run(lerobot_runs.lerobot_train, lerobot_runs.PLUGIN, *flags, *more)


def test_a_student_starts_as_its_teacher(pi: str, pi_student: Path, pi_teacher: Path) -> None:
    config = policy_files.load_config(pi_student)
    assert (config.type, config.use_reflow, config.teacher_model_path) == (
        f"{pi}_reflow",
        True,
        str(pi_teacher.resolve()),
    )
    ours, theirs = lerobot_runs.weights(pi_student), lerobot_runs.weights(pi_teacher)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.sweep(share=0.5)
def test_lerobots_loop_trains_the_expert_with_one_prefix_for_both(pi: str, trained: Any, pi_student: Path) -> None:
    output, log = trained
    before, after = lerobot_runs.weights(pi_student), lerobot_runs.weights(output)
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any(".paligemma." in name for name in moved)
    assert {name.split(".")[1] for name in moved} >= {"paligemma_with_expert", PROJECTIONS[pi], "action_out_proj"}
    assert "shared prefix: on; the VLM is held and run once" in log
    phases = [f"memory/{phase}_host_rss_gib" for phase in ("prefix", "teacher", "forward")]
    for figure in ("loss", *phases, "memory/teacher_own_gib"):
        assert len(lerobot_runs.logged(log, figure)) == 2


def test_the_recipe_accumulates_and_says_why_nothing_is_shared(
    pi_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    flags = lerobot_runs.train_flags(pi_student, toy_dataset, tmp_path / "run", steps=2)
    log = lerobot_runs.run(reflow_recipe.main, *flags, "--gradient_accumulation_steps=2", "--save_freq=2")
    assert "shared prefix: off; the student trains its VLM (--policy.train_expert_only=true would freeze it)" in log
    before, after = lerobot_runs.weights(pi_student), lerobot_runs.weights(tmp_path / "run")
    assert any(".paligemma." in name for name in before if not torch.equal(before[name], after[name]))
    # lerobot logs a batch before its backward pass ends, so the first line has no figure of backward.
    assert len(lerobot_runs.logged(log, "memory/backward_host_rss_gib")) == 1


def test_the_recipe_says_how_a_stock_policy_becomes_a_student(pi: str, pi_teacher: Path) -> None:
    with pytest.raises(ValueError, match=rf"'{pi}': this recipe trains {pi}_reflow.*prepare-student --teacher"):
        reflow_recipe.check_is_student([f"--policy.path={pi_teacher}"])


def test_data_that_a_teacher_would_normalise_otherwise_are_refused(
    pi: str, pi_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    """Check the statistics by which each policy normalises: π0.5's bins of the state depend on them too."""
    shifted = tmp_path / "shifted"
    shutil.copytree(toy_dataset, shifted)
    statistic = {"pi0": "std", "pi05": "q99"}[pi]
    stats = json.loads((shifted / "meta" / "stats.json").read_text())
    stats["observation.state"][statistic] = [2 * value + 1 for value in stats["observation.state"][statistic]]
    (shifted / "meta" / "stats.json").write_text(json.dumps(stats))
    flags = lerobot_runs.train_flags(pi_student, shifted, tmp_path / "run", steps=1)
    with pytest.raises(ValueError, match=f"normalised 'observation.state' with {statistic} .*Reflow on the dataset"):
        reflow_recipe.main(flags)


def test_an_exported_student_is_a_stock_policy(pi: str, trained: Any, tmp_path: Path) -> None:
    output, _ = trained
    card = model_card.write_card(str(output), 1, None)
    assert f"# {TITLES[pi]}, reflowed" in card
    stock = pi0_toys.KINDS[pi].policy
    assert f"from lerobot.policies.{pi}.modeling_{pi} import {stock.__name__}" in card
    folder = prepare.export_student(str(output), tmp_path / "exported", 1, card)
    policy = stock.from_pretrained(folder, strict=True).eval()
    assert (policy.config.type, policy.config.num_inference_steps) == (pi, 1)
    assert "teacher_model_path" not in (folder / "config.json").read_text()
    # Our own class: lerobot's method also accepts missing weights.
    student = pi0_toys.KINDS[pi].student.from_pretrained(policy_files.resolve_checkpoint(output))
    ours = student.state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in policy.state_dict().items())
    preprocess, postprocess = processors.load_processors(policy.config, folder, {"device_processor": {"device": "cpu"}})
    batch = processors.blank_observation(policy.config, preprocess)
    noise = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0))
    student.config.num_inference_steps = 1
    actions = policy.predict_action_chunk(batch, noise=noise)
    assert torch.equal(actions, student.predict_action_chunk(batch, noise=noise))
    assert postprocess(actions).shape == (1, 6, 2)


def test_doctor_says_where_the_teacher_is(pi: str, trained: Any) -> None:
    said = diagnosis.diagnose(str(trained[0]), device="cpu")
    assert f"{pi}_reflow on cpu" in said
    assert "ON CPU (offloaded)" in said
    assert "Shared prefix: on" in said
    assert "All checks PASSED" in said


@pytest.mark.sweep(share=0.5)
def test_students_are_evaluated_against_their_teacher(trained: Any) -> None:
    evaluation, observations = model_card.measure(str(trained[0]), num_steps=(1, 10))
    assert observations.held_out
    assert evaluation.teacher_num_steps == 10
    assert evaluation.teacher.error[10] == 0
    assert evaluation.student.error[1] > 0


@pytest.mark.sweep(share=0.5)
def test_pairs_can_be_computed_ahead(pi_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    flags = [f"--policy.path={pi_student}", "--policy.device=cpu", FROZEN, "--policy.teacher_num_steps=1"]
    flags += smolvla_toy.dataset_flags(toy_dataset)
    couplings = tmp_path / "couplings"
    assert precompute_pairs.precompute_for_policy(flags, couplings, batch_size=16) == []
    run = lerobot_runs.train_flags(pi_student, toy_dataset, tmp_path / "run", steps=1)
    more = (FROZEN, "--policy.teacher_num_steps=1", f"--policy.couplings_path={couplings}")
    log = lerobot_runs.run(lerobot_runs.lerobot_train, lerobot_runs.PLUGIN, *run, *more)
    assert len(lerobot_runs.logged(log, "loss")) == 1
    assert "teacher:" not in log


def test_lerobot_finds_the_policy_by_its_type(pi: str) -> None:
    assert policies.get_policy_class(f"{pi}_reflow") is pi0_toys.KINDS[pi].student
