"""Configuration of policy type `smolvla_reflow`."""

from dataclasses import dataclass

from lerobot.configs import PreTrainedConfig
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

from hf_memopt.reflow import TIME_SAMPLINGS
from hf_memopt.teacher import TEACHER_MODES

DTYPES = ("float32", "bfloat16")


@PreTrainedConfig.register_subclass("smolvla_reflow")
@dataclass
class SmolVLAReflowConfig(SmolVLAConfig):
    """SmolVLA's configuration and the teacher's.

    Attributes:
        use_reflow: train on the teacher's couplings; without it the policy is plain SmolVLA.
        teacher_model_path: checkpoint folder or hub id of a `smolvla` (or already reflowed) policy. Read in training
            only: inference needs no teacher.
        teacher_offload: `"swap"`, the teacher's weights live on the host and visit the device for each target;
            `"resident"`, they stay on the device; `"auto"`, swap on an accelerator and resident on the CPU.
        teacher_dtype: `"float32"` or `"bfloat16"` for the teacher's transformer weights; None, as loaded.
        teacher_num_steps: Euler steps of the teacher; None, its checkpoint's own `num_steps`.
        reflow_time_sampling: density of the training time, see `hf_memopt.reflow.sample_time`.
        share_prefix: compute the keys and values of images and language once for student and teacher, and hold the
            frozen VLM once. `"auto"`, where the student's VLM is frozen and bitwise the teacher's, and one log line
            says so or names what is missing; `"on"`, or fail; `"off"`.
        dtype: `"bfloat16"` trains under bf16 autocast (lerobot's training loop reads this field); weights keep theirs.
    """

    use_reflow: bool = False
    teacher_model_path: str | None = None
    teacher_offload: str = "auto"
    teacher_dtype: str | None = None
    teacher_num_steps: int | None = None
    reflow_time_sampling: str = "beta"
    share_prefix: str = "auto"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        # YAML reads an unquoted on or off as a boolean.
        self.share_prefix = {"True": "on", "False": "off"}.get(self.share_prefix, self.share_prefix)
        _one_of("teacher_offload", self.teacher_offload, TEACHER_MODES)
        _one_of("teacher_dtype", self.teacher_dtype, (None, *DTYPES))
        _one_of("reflow_time_sampling", self.reflow_time_sampling, TIME_SAMPLINGS)
        _one_of("share_prefix", self.share_prefix, ("auto", "on", "off"))
        _one_of("dtype", self.dtype, DTYPES)
        if self.teacher_num_steps is not None and self.teacher_num_steps < 1:
            raise ValueError(f"teacher_num_steps={self.teacher_num_steps} must be at least 1 (or unset)")
        if not self.use_reflow:
            return
        if not self.teacher_model_path:
            raise ValueError(
                "use_reflow=true needs teacher_model_path: pass --policy.teacher_model_path=<checkpoint folder or hub "
                "id>, or start from a student made by `hf-memopt prepare-student`"
            )
        if not self.use_cache:
            raise ValueError("use_cache=false: SmolVLA cannot sample without its cache; set --policy.use_cache=true")


def _one_of(field: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        names = ", ".join("unset" if name is None else name for name in allowed)
        raise ValueError(f"{field}={value!r} is unknown; use one of: {names}")
