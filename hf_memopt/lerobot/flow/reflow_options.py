"""The fields that reflow adds to a policy's configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_memopt.ranges import COUNT, POSITIVE, SHARE
from hf_memopt.reflow import LOSS_KINDS, TIME_SAMPLINGS
from hf_memopt.weights import BASE_HOMES, TEACHER_MODES
from hf_memopt.weights.homes.home import HOMES

DTYPES = ("float32", "bfloat16")
TEACHER, SELF = TARGETS = ("teacher", "self")


@dataclass
class ReflowOptions:
    """Fields of a student's configuration beside its policy's own; mixed into that policy's configuration class.

    Impossible values are refused. Paths become absolute, so that a checkpoint trained with relative ones works from any
    directory.

    Attributes:
        use_reflow: train on the teacher's couplings; without it the policy is the stock one.
        reflow_target: the model whose Euler steps make the targets: `"teacher"`, that of `teacher_model_path`, or
            `"self"`, the student with its present weights, which needs no second model and some `reflow_real_data`.
        teacher_model_path: checkpoint folder or hub id of a stock (or already reflowed) policy of this kind. Training
            reads it for `reflow_target="teacher"` without `couplings_path`; `hf-memopt evaluate` compares with it.
        teacher_offload: `"swap"`, the teacher's weights live on the host and visit the device for each target;
            `"stream"`, they pass through a small ring as they are used; `"resident"`, they stay on the device;
            `"auto"`, the fastest of these that the first two optimizer steps leave room for, and resident on the CPU;
            the recipe replaces it by the result of a simulation before the first step, where there can be one.
        teacher_budget_gib: device memory for the teacher's own weights, for `"auto"` and `"stream"`; None, no limit.
        teacher_home: `"host"`, the teacher's weights are in host memory between targets, unless it stays on the device;
            `"file"`, they are read from its checkpoint's files, or where those do not hold them as they are (with
            `teacher_dtype`, say), from a temporary file, in `activation_disk` if that is set. On a CPU `"auto"` streams
            them then.
        teacher_dtype: `"float32"` or `"bfloat16"` for the teacher's transformer weights; None, as loaded.
        teacher_num_steps: Euler steps to a target; None, the number in the teacher's checkpoint, and 2 with
            `reflow_target="self"`.
        reflow_time_sampling: density of the training time, see `hf_memopt.reflow.sample_time`.
        reflow_loss: `"mse"` or `"huber"`, see `hf_memopt.reflow.chunk_loss`.
        reflow_real_data: share of samples, in [0, 1), whose pair is a demonstration and the noise that the teacher's
            ODE, run the other way, takes it to. The others are noise and the actions that it is taken to. With
            `reflow_target="self"` the noise is drawn, and the others are trained at time 1 alone. None: 0, and 0.5
            with `reflow_target="self"`.
        reflow_round: how often this policy has been rectified once it is trained; `prepare-student` counts.
        couplings_path: folder that `hf-memopt precompute` wrote; pairs are read from it and no teacher is loaded.
        couplings_seed: draw each frame's noise from this seed, so that its pair is the same whenever it is used. None,
            fresh noise in every step. With `couplings_path`, None takes the folder's seed.
        couplings_per_frame: different pairs of a frame with `couplings_seed`; None, 1 or the folder's number.
        share_prefix: compute the keys and values of images and language once for student and teacher, and hold the
            frozen VLM once. `"auto"`, where the student's VLM is frozen and bitwise the teacher's, and one log line
            says so or names the missing condition; `"on"`, or fail; `"off"`.
        vlm_home: where the frozen VLM is: `"device"`, it stays there; `"host"` or `"file"`, it is in host memory or in
            the student's own checkpoint, and visits the device in forward and backward, for student and teacher alike
            (see `hf_memopt.StreamedWeights`); `"auto"`, the better of these two. Needs frozen weights, as
            `train_expert_only` leaves them. In training only.
        activation_offload: tensors saved for backward that go to host memory: `"all"`, those of a plan (`"auto"`, see
            `hf_memopt.ActivationOffloader`), or none (`"off"`). Gradients are the same, bit for bit. Nothing moves on a
            CPU without `activation_disk`.
        activation_budget_gib: with `"auto"`, device memory for saved activations; None, as the planner finds best.
        activation_disk: folder on a local disk, for those that host memory has no room for; on a CPU, for all of them.
            Read in training only.
        from_scratch: let reflow start from random weights, which no teacher's copy is.
        dtype: `"bfloat16"` trains under bf16 autocast, in any loop. SmolVLA's weights keep theirs; the field of
            this name that π0 and π0.5 have makes them bfloat16 as well, but for norms, vision and projections.
    """

    use_reflow: bool = False
    reflow_target: str = TEACHER
    teacher_model_path: str | None = None
    teacher_offload: str = "auto"
    teacher_budget_gib: float | None = None
    teacher_home: str = "host"
    teacher_dtype: str | None = None
    teacher_num_steps: int | None = None
    reflow_time_sampling: str = "beta"
    reflow_loss: str = "mse"
    reflow_real_data: float | None = None
    reflow_round: int = 1
    couplings_path: str | None = None
    couplings_seed: int | None = None
    couplings_per_frame: int | None = None
    share_prefix: str = "auto"
    vlm_home: str = "device"
    activation_offload: str = "off"
    activation_budget_gib: float | None = None
    activation_disk: str | None = None
    from_scratch: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the policy's own configuration
        self.teacher_model_path = absolute_if_local(self.teacher_model_path)
        self.couplings_path = absolute_if_local(self.couplings_path)
        self.activation_disk = absolute_if_local(self.activation_disk)
        # YAML reads an unquoted on or off as a boolean.
        self.share_prefix = {"True": "on", "False": "off"}.get(self.share_prefix, self.share_prefix)
        self.activation_offload = {"False": "off"}.get(self.activation_offload, self.activation_offload)
        _one_of("reflow_target", self.reflow_target, TARGETS)
        _one_of("teacher_offload", self.teacher_offload, TEACHER_MODES)
        POSITIVE.check("teacher_budget_gib", self.teacher_budget_gib)
        _one_of("teacher_home", self.teacher_home, HOMES)
        _one_of("teacher_dtype", self.teacher_dtype, (None, *DTYPES))
        _one_of("reflow_time_sampling", self.reflow_time_sampling, TIME_SAMPLINGS)
        _one_of("reflow_loss", self.reflow_loss, LOSS_KINDS)
        _one_of("share_prefix", self.share_prefix, ("auto", "on", "off"))
        _one_of("vlm_home", self.vlm_home, ("device", *BASE_HOMES))
        _one_of("activation_offload", self.activation_offload, ("off", "auto", "all"))
        POSITIVE.check("activation_budget_gib", self.activation_budget_gib)
        if self.activation_budget_gib is not None and self.activation_offload != "auto":
            raise ValueError(
                f"activation_budget_gib={self.activation_budget_gib} needs activation_offload=auto; "
                f"{self.activation_offload} is set"
            )
        if self.activation_disk is not None and self.activation_offload == "off":
            raise ValueError(f"activation_disk={self.activation_disk!r} needs activation_offload=auto or all")
        _one_of("dtype", self.dtype, DTYPES)
        for name in ("teacher_num_steps", "couplings_per_frame", "reflow_round"):
            COUNT.check(name, getattr(self, name))
        SHARE.check("reflow_real_data", self.data_share)
        if self.use_reflow:
            self._check_reflow()

    @property
    def teaches_itself(self) -> bool:
        return self.reflow_target == SELF

    @property
    def data_share(self) -> float:
        """Return the share of samples that are demonstrations."""
        if self.reflow_real_data is None:
            return 0.5 if self.teaches_itself else 0.0
        return self.reflow_real_data

    @property
    def has_teacher(self) -> bool:
        """Return whether training needs a second model: neither the student nor a folder has the targets."""
        return not self.teaches_itself and self.couplings_path is None

    def check_start(self: Any) -> None:
        """Raise a ValueError if reflow would start from random weights without `from_scratch`."""
        if self.use_reflow and not self.pretrained_path and not self.from_scratch:
            teacher = self.teacher_model_path or "<teacher>"
            raise ValueError(
                "the student would start from random weights, and reflow trains a copy of the teacher; make one with "
                f"`hf-memopt prepare-student --teacher {teacher} --output outputs/student_init` and pass "
                "--policy.path=outputs/student_init in place of --policy.type, or pass --policy.from_scratch=true"
            )

    def _check_reflow(self) -> None:
        if self.teacher_model_path == SELF:
            raise ValueError(
                "teacher_model_path='self' names no policy; a student teaches itself with --policy.reflow_target=self"
            )
        if self.teaches_itself:
            self._check_self()
        elif not self.teacher_model_path and not self.couplings_path:
            raise ValueError(
                "use_reflow=true needs teacher_model_path: pass --policy.teacher_model_path=<checkpoint folder or hub "
                "id>, start from a student made by `hf-memopt prepare-student`, or pass --policy.couplings_path or "
                "--policy.reflow_target=self"
            )
        fixed = "couplings_path" if self.couplings_path is not None else "couplings_seed"
        if self.data_share > 0 and getattr(self, fixed) is not None:
            raise ValueError(
                f"reflow_real_data={self.data_share} asks the teacher for the noise of demonstrations, and "
                f"{fixed} fixes the noise of each frame; leave one of them out"
            )
        if self.couplings_per_frame is not None and self.couplings_seed is None and self.couplings_path is None:
            raise ValueError(
                f"couplings_per_frame={self.couplings_per_frame} needs couplings_seed; without it each step draws new "
                "noise"
            )

    def _check_self(self) -> None:
        if self.data_share == 0:
            raise ValueError(
                "reflow_target=self with reflow_real_data=0: any field of straight lines is its own target, and the "
                "student drifts away from the data; leave it out, which takes 0.5"
            )
        for name in ("couplings_path", "couplings_seed"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name}={value!r} with reflow_target=self: fixed pairs are a teacher's, and the student's own "
                    f"targets change in every step; leave {name} out, or pass --policy.reflow_target=teacher"
                )


def is_student(config: Any) -> bool:
    return isinstance(config, ReflowOptions)


def absolute_if_local(name: str | None) -> str | None:
    """Return the absolute path of a file on this machine, and any other text (a hub id, say) as it is."""
    if not name or not Path(name).expanduser().exists():
        return name
    return str(Path(name).expanduser().absolute())


def _one_of(field: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        names = ", ".join("unset" if name is None else name for name in allowed)
        raise ValueError(f"{field}={value!r} is unknown; use one of: {names}")
