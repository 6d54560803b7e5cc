"""Tests of a π0 by both libraries' commands, from stock training to a student that stock lerobot loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule

known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
modeling_pi0_reflow = LateModule("hf_memopt.lerobot.pi0.modeling_pi0_reflow")
policy_files = LateModule("hf_memopt.lerobot.policy_files")
processors = LateModule("hf_memopt.lerobot.processors")
precompute_pairs = LateModule("hf_memopt.lerobot.reflow.precompute_pairs")
diagnosis = LateModule("hf_memopt.lerobot.student.diagnosis")
model_card = LateModule("hf_memopt.lerobot.student.model_card")
prepare = LateModule("hf_memopt.lerobot.student.prepare")
reflow_recipe = LateModule("hf_memopt.recipes.reflow_smolvla")
smolvla_toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
policies = LateModule("lerobot.policies")
modeling_pi0 = LateModule("lerobot.policies.pi0.modeling_pi0")
lerobot_runs = LateModule("lerobot_runs")
pi0_toys = LateModule("pi0_toys")

pytestmark = pytest.mark.usefixtures("toy_pi0")

FROZEN = "--policy.train_expert_only=true"


@pytest.fixture(scope="module")
def pi0_student(toy_vlm: Path, pi0_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an untrained student. Read only."""
    with pi0_toys.toy_sizes(toy_vlm):
        return prepare.prepare_student(str(pi0_teacher), tmp_path_factory.mktemp("pi0") / "student")


@pytest.fixture(scope="module")
def trained(toy_vlm: Path, pi0_student: Path, toy_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder and log of two steps in lerobot's own loop. Read only."""
    output = tmp_path_factory.mktemp("pi0") / "run"
    flags = lerobot_runs.train_flags(pi0_student, toy_dataset, output, steps=2)
    more = (FROZEN, "--policy.teacher_offload=swap", "--policy.reflow_real_data=0.5", "--dataset.eval_split=0.25")
    with pi0_toys.toy_sizes(toy_vlm):
        return output, lerobot_runs.run(lerobot_runs.lerobot_train, lerobot_runs.PLUGIN, *flags, *more)


def test_a_student_starts_as_its_teacher(pi0_student: Path, pi0_teacher: Path) -> None:
    config = policy_files.load_config(pi0_student)
    assert (config.type, config.use_reflow, config.teacher_model_path) == (
        "pi0_reflow",
        True,
        str(pi0_teacher.resolve()),
    )
    ours, theirs = lerobot_runs.weights(pi0_student), lerobot_runs.weights(pi0_teacher)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_lerobots_loop_trains_the_expert_with_one_prefix_for_both(trained: Any, pi0_student: Path) -> None:
    output, log = trained
    before, after = lerobot_runs.weights(pi0_student), lerobot_runs.weights(output)
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any(".paligemma." in name for name in moved)
    assert {name.split(".")[1] for name in moved} >= {"paligemma_with_expert", "state_proj", "action_out_proj"}
    assert "shared prefix: on; the VLM is held and run once" in log
    phases = [f"memory/{phase}_host_rss_gib" for phase in ("prefix", "teacher", "forward")]
    for figure in ("loss", *phases, "memory/teacher_own_gib"):
        assert len(lerobot_runs.logged(log, figure)) == 2


def test_the_recipe_accumulates_and_says_why_nothing_is_shared(
    pi0_student: Path, toy_dataset: Path, tmp_path: Path
) -> None:
    flags = lerobot_runs.train_flags(pi0_student, toy_dataset, tmp_path / "run", steps=2)
    log = lerobot_runs.run(reflow_recipe.main, *flags, "--gradient_accumulation_steps=2", "--save_freq=2")
    assert "shared prefix: off; the student trains its VLM (--policy.train_expert_only=true would freeze it)" in log
    before, after = lerobot_runs.weights(pi0_student), lerobot_runs.weights(tmp_path / "run")
    assert any(".paligemma." in name for name in before if not torch.equal(before[name], after[name]))
    # lerobot logs a batch before its backward pass ends, so the first line has no figure of backward.
    assert len(lerobot_runs.logged(log, "memory/backward_host_rss_gib")) == 1


def test_the_recipe_says_how_a_stock_policy_becomes_a_student(pi0_teacher: Path) -> None:
    with pytest.raises(ValueError, match=r"'pi0': this recipe trains pi0_reflow.*prepare-student --teacher"):
        reflow_recipe.check_is_student([f"--policy.path={pi0_teacher}"])


def test_an_exported_student_is_a_stock_pi0(trained: Any, tmp_path: Path) -> None:
    output, _ = trained
    card = model_card.write_card(str(output), 1, None)
    assert "# π0, reflowed" in card
    assert "from lerobot.policies.pi0.modeling_pi0 import PI0Policy" in card
    folder = prepare.export_student(str(output), tmp_path / "exported", 1, card)
    policy = modeling_pi0.PI0Policy.from_pretrained(folder, strict=True).eval()
    assert (policy.config.type, policy.config.num_inference_steps) == ("pi0", 1)
    assert "teacher_model_path" not in (folder / "config.json").read_text()
    # Our own class: lerobot's method also accepts missing weights.
    student = modeling_pi0_reflow.PI0ReflowPolicy.from_pretrained(policy_files.resolve_checkpoint(output))
    ours = student.state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in policy.state_dict().items())
    preprocess, postprocess = processors.load_processors(policy.config, folder, {"device_processor": {"device": "cpu"}})
    batch = processors.blank_observation(policy.config, preprocess)
    noise = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0))
    student.config.num_inference_steps = 1
    actions = policy.predict_action_chunk(batch, noise=noise)
    assert torch.equal(actions, student.predict_action_chunk(batch, noise=noise))
    assert postprocess(actions).shape == (1, 6, 2)


def test_doctor_says_where_the_teacher_is(trained: Any) -> None:
    said = diagnosis.diagnose(str(trained[0]), device="cpu")
    assert "pi0_reflow on cpu" in said
    assert "ON CPU (offloaded)" in said
    assert "Shared prefix: on" in said
    assert "All checks PASSED" in said


def test_students_are_evaluated_against_their_teacher(trained: Any) -> None:
    evaluation, observations = model_card.measure(str(trained[0]), num_steps=(1, 10))
    assert observations.held_out
    assert evaluation.teacher_num_steps == 10
    assert evaluation.teacher.error[10] == 0
    assert evaluation.student.error[1] > 0


def test_pairs_can_be_computed_ahead(pi0_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    flags = [f"--policy.path={pi0_student}", "--policy.device=cpu", FROZEN, "--policy.teacher_num_steps=1"]
    flags += smolvla_toy.dataset_flags(toy_dataset)
    couplings = tmp_path / "couplings"
    assert precompute_pairs.precompute_for_policy(flags, couplings, batch_size=16) == []
    run = lerobot_runs.train_flags(pi0_student, toy_dataset, tmp_path / "run", steps=1)
    more = (FROZEN, "--policy.teacher_num_steps=1", f"--policy.couplings_path={couplings}")
    log = lerobot_runs.run(lerobot_runs.lerobot_train, lerobot_runs.PLUGIN, *run, *more)
    assert len(lerobot_runs.logged(log, "loss")) == 1
    assert "teacher:" not in log


def test_lerobot_finds_the_policy_by_its_type() -> None:
    assert policies.get_policy_class("pi0_reflow") is modeling_pi0_reflow.PI0ReflowPolicy
