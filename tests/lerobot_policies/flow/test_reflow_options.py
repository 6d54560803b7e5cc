import dataclasses
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

reflow_options = LateModule("hf_memopt.lerobot.flow.reflow_options")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")


SELF: dict[str, Any] = {"reflow_target": "self", "reflow_real_data": 0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reflow_loss": "l1"}, "reflow_loss='l1' is unknown"),
        ({"teacher_budget_gib": 0}, "teacher_budget_gib=0 must be above 0"),
        ({"teacher_home": "disk"}, "teacher_home='disk' is unknown; use one of: host, file"),
        ({"teacher_dtype": "float16"}, "teacher_dtype='float16' is unknown; use one of: unset, float32, bfloat16"),
        ({"reflow_time_sampling": "gamma"}, "use one of: beta, uniform, ushaped, one"),
        ({"share_prefix": "yes"}, "use one of: auto, on, off"),
        ({"activation_offload": "inputs"}, "activation_offload='inputs' is unknown; use one of: off, auto, all"),
        ({"activation_offload": "auto", "activation_budget_gib": 0}, "activation_budget_gib=0 must be above 0"),
        ({"activation_disk": "/nvme"}, "activation_disk='/nvme' needs activation_offload=auto or all"),
        ({"activation_budget_gib": 2}, "activation_budget_gib=2 needs activation_offload=auto; off is set"),
        ({"dtype": "float16"}, "use one of: float32, bfloat16"),
        ({"teacher_num_steps": 0}, "teacher_num_steps=0 must be at least 1"),
        ({"reflow_real_data": 1.0}, "reflow_real_data=1.0 must be"),
        ({"reflow_real_data": 0.1, "couplings_path": "c"}, "couplings_path fixes the noise"),
        ({"reflow_real_data": 0.1, "couplings_seed": 1}, "couplings_seed fixes the noise"),
        ({"couplings_per_frame": 2}, "couplings_per_frame=2 needs couplings_seed"),
        ({"couplings_per_frame": 0}, "couplings_per_frame=0 must be"),
        ({"reflow_round": 0}, "reflow_round=0 must be"),
        ({"reflow_target": "me"}, "reflow_target='me' is unknown; use one of: teacher, self"),
        (
            {"reflow_target": "self", "reflow_real_data": 0.0},
            "=self with reflow_real_data=0: .* leave it out",
        ),
        ({**SELF, "couplings_seed": 1}, "couplings_seed=1 with reflow_target=self"),
        ({**SELF, "couplings_path": "/c"}, "couplings_path='/c' with reflow_target=self.*leave"),
        ({"teacher_model_path": "self"}, "names no policy; .*--policy.reflow_target=self"),
        (
            {"teacher_model_path": None},
            "needs teacher_model_path: pass .*or --policy.reflow_target=self",
        ),
    ],
)
def test_unusable_settings_are_refused_by_name(toy_student: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(policy_files.load_config(toy_student), **changes)


def test_yaml_may_say_off_without_quotes(toy_student: Path) -> None:
    assert dataclasses.replace(policy_files.load_config(toy_student), share_prefix=str(False)).share_prefix == "off"
    read = dataclasses.replace(policy_files.load_config(toy_student), activation_offload=str(False))
    assert read.activation_offload == "off"
    with pytest.raises(ValueError, match="share_prefix='maybe' is unknown"):
        dataclasses.replace(policy_files.load_config(toy_student), share_prefix="maybe")


def test_only_students_have_these_fields(toy_student: Path, toy_teacher: Path) -> None:
    assert reflow_options.is_student(policy_files.load_config(toy_student))
    assert not reflow_options.is_student(policy_files.load_config(toy_teacher))


def test_a_student_that_teaches_itself_needs_no_teacher_and_may_name_one(toy_student: Path) -> None:
    taught = policy_files.load_config(toy_student)
    assert (taught.teaches_itself, taught.has_teacher) == (False, True)
    for teacher in (None, taught.teacher_model_path):
        alone = dataclasses.replace(taught, **SELF, teacher_model_path=teacher)
        assert (alone.teaches_itself, alone.has_teacher) == (True, False)
