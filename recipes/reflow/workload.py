"""Plans for `reflow_smolvla.py`: lerobot's own update, run on fake tensors; and the home of a run's teacher."""

import copy
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from accelerate import Accelerator, PartialState
from lerobot.configs import PreTrainedConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.optim.optimizers import OptimizerConfig
from lerobot.policies.common.flow_matching import euler_integrate
from lerobot.policies.smolvla import modeling_smolvla
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.scripts.lerobot_train import update_policy
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoModelForImageTextToText

from hf_memopt.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.lerobot.files.policy_files import load_config, resolve_checkpoint
from hf_memopt.lerobot.flow import flow_policy
from hf_memopt.lerobot.flow.reflow_options import is_student
from hf_memopt.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.planning import Row, SettingsPlan, plan
from hf_memopt.planning.cards.gpus import Card
from hf_memopt.planning.models.model_config import read_config
from hf_memopt.planning.simulation.child_process import IsolatedError
from hf_memopt.planning.simulation.patched_transformers import weights_from_config
from hf_memopt.planning.simulation.virtual_time import VirtualClock
from hf_memopt.planning.workload import Settings
from hf_memopt.planning.workloads.policy_update import batch_of
from hf_memopt.recipes.common.auto_plan import PRECISION, RecipeWorkload, best_row, card_of
from hf_memopt.recipes.reflow.lerobot_loop import ACCUMULATION_FLAG, make_accelerator
from hf_memopt.transfer import clock_for
from hf_memopt.units import format_gib
from hf_memopt.weights.strategies.auto import usable_bytes

__all__ = ["workload"]

# Steps until streamed weights are as they will be: their first visit is watched, the second follows a plan.
STEPS_OF_STREAM = 3
# Euler steps after which each of the teacher's repeats the one before it.
_NUM_EULER_STEPS = 2

Velocity = Callable[[Tensor, Tensor], Tensor]


class Options(NamedTuple):
    """The arguments of a candidate: the student's configuration, its folder, and the batch."""

    policy: SmolVLAReflowConfig
    path: Path
    batch_size: int
    accumulation: int


class Run(NamedTuple):
    """The arguments of `step`, on the accelerator's device."""

    accelerator: Accelerator
    policy: SmolVLAReflowPolicy
    teacher: SmolVLAPolicy
    optimizer: Optimizer
    batch: dict[str, Tensor]
    settings: OptimizerConfig
    num_micro_batches: int
    repeats_euler_steps: bool


def workload(
    config_path: str | Path, *, precision: str | None = None, effective_batch: int | None = None
) -> "SmolVLAReflow":
    """Return the workload of a student, as for `reflow_smolvla.py --policy.path=FOLDER`.

    Args:
        config_path: a folder that `hf-memopt prepare-student` wrote, or its `config.json`. The teacher must be where
            the student's configuration says.
        precision: "no", "bf16", or "auto" to try both; None, as the configuration says.
        effective_batch: frames per update; None, lerobot's batch.

    Raises:
        ValueError: no student is there, or it trains in a way that is not simulated: without a teacher of its own, on
            couplings that belong to frames, or compiled.
    """
    path = Path(config_path)
    folder = resolve_checkpoint(path.parent if path.is_file() else path)
    config = load_config(folder)
    if not is_student(config):
        raise ValueError(f"{folder} holds a policy of type {config.type!r}; make a student with prepare-student")
    return SmolVLAReflow(config, folder, precision=precision, effective_batch=effective_batch)


class SmolVLAReflow(RecipeWorkload):
    """A SmolVLA student and its teacher, whose weights are never read; `micro_batch` allows no other.

    The VLMs are taken to be equal, as `prepare-student` makes them, so that they are shared wherever the student's
    configuration allows it. Images are taken to have the size that the configuration says, and every instruction to
    have `tokenizer_max_length` tokens, which is the most that it can have.
    """

    packages = ("hf_memopt[lerobot]",)
    MODULE = "hf_memopt.recipes.reflow_smolvla"
    BATCH = ("batch_size", "accumulation")
    LEVERS: ClassVar = {"teacher_offload": {mode: {"teacher_offload": mode} for mode in ("resident", "swap", "stream")}}

    def __init__(
        self,
        config: PreTrainedConfig,
        folder: Path,
        *,
        precision: str | None = None,
        effective_batch: int | None = None,
        micro_batch: int | None = None,
    ) -> None:
        why_not = why_not_simulated(config)
        if why_not is not None:
            raise ValueError(f"{why_not}; train without a plan")
        given = "bf16" if config.dtype == "bfloat16" else "no"
        options = Options(config, folder, TrainPipelineConfig.batch_size, 1)
        super().__init__(
            f"SmolVLA reflow of {folder.name}", options, given if precision is None else precision, effective_batch
        )
        self._micro_batch = micro_batch

    @property
    def micro_batches(self) -> list[int]:
        return super().micro_batches if self._micro_batch is None else [self._micro_batch]

    def num_steps(self, options: Options, num_micro_batches: int) -> int:
        streams = options.policy.teacher_offload == "stream" or options.policy.vlm_home != "device"
        return STEPS_OF_STREAM if streams else 2

    def with_settings(self, settings: Settings, micro_batch: int) -> Options:
        policy = copy.deepcopy(self.options.policy)
        policy.teacher_offload = settings["teacher_offload"]
        policy.dtype = "bfloat16" if settings[PRECISION] == "bf16" else "float32"
        return self.options._replace(policy=policy, **self.batching(micro_batch))

    def setup(self, options: Options, precision: str) -> Run:
        config = copy.deepcopy(options.policy)
        config.device = None  # where accelerate is
        config.teacher_home = "host"  # the same on the device, and there are no weights to read
        num_micro_batches = self.num_simulated(options, options.accumulation)
        accelerator = make_accelerator(config.dtype, config.device, num_micro_batches)
        with weights_from_config(AutoModelForImageTextToText, read_config):
            policy: Any = SmolVLAReflowPolicy(config).to(accelerator.device)
        with _equal_to(policy):
            teacher = policy.load_teacher_model()
        settings = config.get_optimizer_preset()
        policy, optimizer = accelerator.prepare(policy, settings.build(policy.get_optim_params()))
        batch = batch_of(config, options.batch_size, accelerator.device)
        # A streamed teacher's copies go on from one Euler step to the next.
        repeats = config.teacher_offload != "stream"
        return Run(accelerator, policy, teacher, optimizer, batch, settings, num_micro_batches, repeats)

    def step(self, state: Run) -> MetricsTracker:
        names = ("loss", "grad_norm", "lr", "update_s", "dataloading_s")
        metrics = MetricsTracker(1, 1, 1, {name: AverageMeter(name) for name in names})
        clock: Any = clock_for(state.accelerator.device)
        repeats = state.repeats_euler_steps and isinstance(clock, VirtualClock)
        with _repeated_euler_steps(clock) if repeats else nullcontext():
            for _ in range(state.num_micro_batches):
                clip = state.settings.grad_clip_norm
                update_policy(metrics, state.policy, state.batch, state.optimizer, clip, state.accelerator)
        return metrics

    def write_options(self, options: Options, folder: Path) -> Path:
        flags = {
            "policy.path": options.path,
            "policy.teacher_offload": options.policy.teacher_offload,
            "policy.dtype": options.policy.dtype,
            "batch_size": options.batch_size,
            ACCUMULATION_FLAG: options.accumulation,
        }
        written = folder / "reflow_smolvla.flags"
        lines = [shlex.quote(f"--{name}={value}") for name, value in flags.items()]
        written.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return written

    def command(self, written: list[Path]) -> str:
        """Return the command that runs the recipe with the files that `write` wrote, on data that the reader names."""
        flags, config = (shlex.quote(str(path)) for path in written)
        launch = f"accelerate launch --config_file {config} -m {self.MODULE}"
        return f"xargs {launch} --dataset.repo_id=DATASET --output_dir=FOLDER < {flags}"


def why_not_simulated(config: PreTrainedConfig) -> str | None:
    """Say which setting keeps a policy's training from being simulated; None, none does."""
    if not isinstance(config, SmolVLAReflowConfig):
        return f"policy type {config.type!r}: only smolvla_reflow is simulated"
    reasons = {
        "use_reflow": (not config.use_reflow, "it is plain SmolVLA"),
        "couplings_path": (config.couplings_path is not None, "its pairs are read by the dataset's frames"),
        "couplings_seed": (config.couplings_seed is not None, "its pairs are made frame by frame"),
        "reflow_target": (config.teaches_itself, "there is no teacher to place"),
        "activation_offload": (config.activation_offload != "off", "its plan is made from the run's own steps"),
        "compile_model": (config.compile_model, "compiled code is not seen"),
    }
    for field, (refused, reason) in reasons.items():
        if refused:
            return f"{field}={getattr(config, field)!r}: such a training is not simulated, since {reason}"
    return None


@contextmanager
def _repeated_euler_steps(clock: VirtualClock) -> Iterator[None]:
    """Simulate three of the teacher's Euler steps; the others do the same in the same memory, and take their time."""

    def integrate(velocity: Velocity, noise: Tensor, num_steps: int, **options: Any) -> Tensor:
        num_more = num_steps - _NUM_EULER_STEPS - 1
        if num_more < 1:
            return euler_integrate(velocity, noise, num_steps, **options)
        between = euler_integrate(velocity, noise, _NUM_EULER_STEPS, **options)
        with clock.repeating(num_more):
            return euler_integrate(velocity, between, 1, **options)

    name = "euler_integrate"
    with patch.object(modeling_smolvla, name, integrate), patch.object(flow_policy, name, integrate):
        yield


def _equal_to(student: SmolVLAPolicy) -> AbstractContextManager[Any]:
    """Give a teacher that is loaded inside the student's weights, as the student had the teacher's at first."""

    def from_pretrained(folder: Path, *, config: Any, strict: bool) -> SmolVLAPolicy:
        teacher = SmolVLAPolicy(config)
        teacher.load_state_dict(student.state_dict(), strict=strict)
        return teacher.eval()

    return patch.object(SmolVLAPolicy, "from_pretrained", from_pretrained)


logger = logging.getLogger(__name__)


def planned_home(cfg: TrainPipelineConfig, num_accumulation_steps: int, card: str) -> str:
    """Return the `teacher_offload` with which a run is fastest of those that fit `card`, "auto" for this process's."""
    return _home(best_row(_workload(cfg, num_accumulation_steps), card, PartialState()))


def decided_home(cfg: TrainPipelineConfig, num_accumulation_steps: int) -> str:
    """Return the `teacher_offload` of a run: that of its flags, and for "auto" the fastest that fits by simulation.

    Homes are simulated from the fastest on, one after another, until one fits into the card's free memory. Where that
    cannot be said, the answer is "auto", with which a teacher begins on the host and is placed by the memory that two
    optimizer steps leave. Logs one line that says which, and why. No line, and no simulation, where nothing is open:
    the flags name a home or a budget, there is no teacher of its own, or the run is on a CPU.

    Cost: some 20 s of one core at full size for each home that is tried. Before the first backward on a device, since
    the simulation's process is forked.
    """
    policy = cfg.policy
    has_teacher = policy.use_reflow and policy.has_teacher
    is_open = policy.teacher_offload == "auto" and policy.teacher_budget_gib is None
    if not (has_teacher and is_open) or policy.device == "cpu":
        return str(policy.teacher_offload)
    why_not = _why_not_simulated(cfg)
    if why_not is not None:
        return _measured(logging.INFO, why_not)
    card = _room()
    try:
        found = plan(_workload(cfg, num_accumulation_steps), gpu=card, num_workers=1)
    except (ValueError, IsolatedError) as error:
        # The run may go on all the same: it finds faults other than the simulation's itself.
        return _measured(logging.WARNING, str(error).splitlines()[0])
    logger.info("teacher_offload=auto: %s", _reason(found, cfg.batch_size))
    return _home(found.best)


def _why_not_simulated(cfg: TrainPipelineConfig) -> str | None:
    if not torch.cuda.is_available():
        return f"device={cfg.policy.device!r} is no CUDA device, whose rules a simulation follows"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "of several processes only one would be simulated, without the buckets of their gradients"
    if cfg.policy.pretrained_path is None:
        return "no --policy.path names the student"
    if cfg.peft is not None:
        return "a student with adapters is not simulated"
    if not cfg.use_policy_training_preset:
        return "use_policy_training_preset=False: only the policy's own optimizer is simulated"
    return why_not_simulated(cfg.policy)


def _measured(level: int, why: str) -> str:
    logger.log(level, "teacher_offload=auto: to be decided by what the first two optimizer steps leave; %s", why)
    return "auto"


def _room() -> Card:
    """Return this process's card with the memory that others leave of it, less a share for fragmentation."""
    device = torch.device("cuda", torch.cuda.current_device())
    card = card_of(device)
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    # The context of this process has been taken from the free memory, and is counted once more in each plan.
    return replace(card, memory_bytes=usable_bytes(min(total_bytes, free_bytes + card.context_bytes)))


def _workload(cfg: TrainPipelineConfig, num_accumulation_steps: int) -> SmolVLAReflow:
    folder, size = Path(cfg.policy.pretrained_path), cfg.batch_size
    return SmolVLAReflow(cfg.policy, folder, effective_batch=size * num_accumulation_steps, micro_batch=size)


def _home(row: Row) -> str:
    return str(row.settings["teacher_offload"])


def _reason(found: SettingsPlan, batch_size: int) -> str:
    best, card = found.best, found.card
    too_large = [row for row in found.rows if not row.fits]
    others = [f"; {_home(row)} needs {format_gib(row.needed_bytes)}" for row in too_large]
    return (
        f"{_home(best)}, by simulation of a batch of {batch_size}: predicted peak "
        f"{format_gib(best.estimate.peak_bytes)}, needs {format_gib(best.needed_bytes)} of the "
        f"{format_gib(card.memory_bytes)} that {card.name} can give{''.join(others)}"
    )
