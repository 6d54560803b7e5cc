"""What `hf-memopt doctor --policy` says about a student and its teacher."""

import torch

from hf_memopt.integrations.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.integrations.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.integrations.lerobot.policy_files import load_config, resolve_checkpoint
from hf_memopt.integrations.lerobot.processors import check_processors
from hf_memopt.units import MIB


def diagnose(policy: str, device: str | None = None) -> str:
    """Load a student and its teacher as training would, and say where the teacher is.

    Args:
        policy: checkpoint folder, training output folder or hub id.
        device: where the student would train; None, the accelerator if there is one.

    Raises:
        ValueError: no `smolvla_reflow` policy with `use_reflow`, or whatever keeps the teacher from loading.
    """
    folder = resolve_checkpoint(policy)
    config = load_config(folder)
    if not isinstance(config, SmolVLAReflowConfig) or not config.use_reflow:
        raise ValueError(f"{folder} has no teacher: its policy is of type {config.type!r} without use_reflow=true")
    taught = not config.teaches_itself and config.couplings_path is None
    for each in [folder, *([resolve_checkpoint(str(config.teacher_model_path))] if taught else [])]:
        check_processors(each)
    device = device or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    config.device = device
    student = SmolVLAReflowPolicy.from_pretrained(folder, config=config)
    student.load_teacher_model()
    return "\n".join([f"Policy {folder}: smolvla_reflow on {device}", *_teacher_lines(student)])


def _teacher_lines(student: SmolVLAReflowPolicy) -> list[str]:
    report = student.teacher_report()
    if report is None:
        source = student.config.couplings_path
        return ["Teacher Model: none", f"  Targets: {f'from {source}' if source else 'of the student itself'}"]
    said = {"swap": "offloaded", "stream": f"offloaded: {report.reason}"}
    status = said.get(report.mode, f"not offloaded: {report.reason}")
    lines = [
        "Teacher Model Device:",
        f"  Checkpoint: {student.config.teacher_model_path}",
        f"  Device: {report.home}",
        f"  Status: {'✓ ON CPU' if report.home == 'cpu' else 'ON ' + report.home.upper()} ({status})",
        f"  Own weights: {(report.host_bytes or report.device_bytes) / MIB:.1f} MiB, "
        f"of which {report.device_bytes / MIB:.1f} MiB on the device between targets",
    ]
    if report.shared_bytes:
        lines.append(
            f"  Shared prefix: on; {report.shared_bytes / MIB:.1f} MiB of the VLM are held once, by the student"
        )
    else:
        lines.append(f"  Shared prefix: off; {student.why_prefix_not_shared}")
    return lines
