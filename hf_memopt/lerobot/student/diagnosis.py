"""The answer of `hf-memopt doctor --policy` about a student and its teacher."""

from pathlib import Path
from typing import Any

import torch
from lerobot.policies import get_policy_class

from hf_memopt.lerobot.files.checkpoint_files import blank_observation, check_processors, load_processors
from hf_memopt.lerobot.files.policy_files import load_config, resolve_checkpoint
from hf_memopt.lerobot.flow.known_flows import observe
from hf_memopt.lerobot.flow.reflow_options import is_student
from hf_memopt.lerobot.reflow.reflow_policy import ReflowPolicy
from hf_memopt.units import MIB
from hf_memopt.weights import TeacherReport


def diagnose(policy: str, device: str | None = None) -> str:
    """Load a student and its teacher as training would, make one target, and say where the teacher is."""
    folder = resolve_checkpoint(policy)
    config = load_config(folder)
    if not is_student(config) or not config.use_reflow:
        raise ValueError(f"{folder} has no teacher: its policy is of type {config.type!r} without use_reflow=true")
    for each in [folder, *([resolve_checkpoint(str(config.teacher_model_path))] if config.has_teacher else [])]:
        check_processors(each)
    device = device or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    config.device = device
    student = get_policy_class(config.type).from_pretrained(folder, config=config)
    student.load_teacher_model()
    if config.couplings_path is not None:
        lines = ["Teacher Model: none", f"  Targets: from {config.couplings_path}"]
        passed = "the student loads"
    else:
        _make_target(student, folder)
        if (report := student.teacher.report()) is None:
            lines = ["Teacher Model: none", "  Targets: of the student itself"]
            passed = "the student loads, and its own target is finite"
        else:
            lines = teacher_lines(student, report)
            passed = "student and teacher load, and the teacher's target is finite"
    head = f"Policy {folder}: {config.type} on {device}"
    return "\n".join([head, *lines, "", f"✓ All checks PASSED: {passed}."])


def teacher_lines(student: ReflowPolicy, report: TeacherReport) -> list[str]:
    place = "IN FILES" if report.file_bytes else f"ON {report.home.upper()}"
    status = f"✓ {place} (offloaded)" if report.host_bytes else f"{place} (not offloaded)"
    shared = f"on; {report.shared_bytes / MIB:.1f} MiB of the VLM are held once, by the student"
    return [
        "Teacher Model Device:",
        f"  Device: {report.home}",
        f"  Status: {status}",
        f"  Mode: {report.mode}; {report.reason}",
        f"  Checkpoint: {student.config.teacher_model_path}",
        f"  Own weights: {report.own_bytes / MIB:.1f} MiB, "
        f"of which {report.device_bytes / MIB:.1f} MiB on the device between targets",
        f"  Copied for one target: {report.bytes_host_to_device / MIB:.1f} MiB to the device, "
        f"{report.bytes_device_to_host / MIB:.1f} MiB back",
        f"  Shared prefix: {shared if report.shared_bytes else f'off; {student.teacher.why_not_shared}'}",
    ]


def _make_target(student: ReflowPolicy, folder: Path) -> None:
    device = str(student.config.device)
    preprocess, _ = load_processors(student.config, folder, {"device_processor": {"device": device}})
    observation = observe(student, blank_observation(student.config, preprocess))
    noise = torch.zeros(1, student.config.chunk_size, student.config.max_action_dim, device=device)
    inputs: tuple[Any, ...] = (*observation.arguments(), noise)
    if not student.generate_reflow_target(*inputs).isfinite().all():
        teacher = folder if student.config.teaches_itself else student.config.teacher_model_path
        raise ValueError(f"the teacher {teacher} makes a target that is not finite; take another checkpoint")
