"""Distil a SmolVLA policy into a student that needs one Euler step, with the teacher off the GPU.

    hf-memopt prepare-student --teacher <your fine-tuned smolvla> --output outputs/student_init
    accelerate launch recipes/reflow_smolvla.py --policy.path=outputs/student_init --dataset.repo_id=<repo> \\
        --output_dir=outputs/student --batch_size=8 --gradient_accumulation_steps=4 --policy.dtype=bfloat16
    hf-memopt export --policy outputs/student --output outputs/student_1step --num-steps 1

Every flag of `lerobot-train` works and means the same as there; `--help` lists them. Resume with
`--config_path=outputs/student/checkpoints/last/pretrained_model/train_config.json --resume=true`, and pass the same
`--gradient_accumulation_steps` again: lerobot's saved configuration has no place for it.

Additions to lerobot's own training loop:

- `--gradient_accumulation_steps=N` (here, behind the script's name: `accelerate launch` does not pass its own flag on):
  N batches of `--batch_size` make one optimizer update, with the gradient of one batch N times as large. lerobot's loop
  ignores the setting except for dividing the loss by N. All of lerobot's step counts, the learning-rate schedule
  included, go on counting batches, so `--steps` and `--save_freq` must be multiples of N.
- `--policy.dtype=bfloat16`: autocast in bfloat16.
- `--policy.teacher_offload=auto`, the default: on a CUDA device, where the teacher lives is chosen by simulation before
  the run, for the batch that the flags say and the memory that is free. Where that cannot be simulated, one line says
  why, and the first two optimizer steps decide, as in `lerobot-train`.
- `--plan=auto`, or `--plan=8GiB` for another card: the same, with a table of reasons, and a batch that cannot fit is
  refused. `hf-memopt plan` also varies batch and accumulation.
- `--policy.couplings_path=<folder of hf-memopt precompute>`: the teacher's targets from disk, and no teacher.
- memory by phase in each log line, and in the output folder for `hf-memopt report`: `prefix`, `teacher`, `forward`,
  `backward`, `optimizer`, as peak GiB on an accelerator and resident GiB on the CPU, and the GiB that the teacher owns.
"""

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from operator import attrgetter

from hf_memopt.command_line import one_line_errors, script_imports
from hf_memopt.memory import explain_oom
from hf_memopt.memory.oom import HALF_MICRO_BATCH, OFFLOADING
from hf_memopt.ranges import COUNT, COUNT_OR_ZERO, NOT_NEGATIVE, SEED
from hf_memopt.recipes.common.flags import check_card

with script_imports("reflow_smolvla", __name__):
    from lerobot.configs import DatasetConfig, parser
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.datasets import LeRobotDatasetMetadata

    from hf_memopt.lerobot.evaluate.measure import reading_dataset
    from hf_memopt.lerobot.files.policy_files import load_config, resolve_checkpoint
    from hf_memopt.lerobot.flow.known_flows import STOCK_TYPES
    from hf_memopt.lerobot.flow.reflow_options import is_student
    from hf_memopt.lerobot.training_flags import read_training_flags
    from hf_memopt.recipes.reflow.lerobot_loop import (
        ACCUMULATION_FLAG,
        ACCUMULATION_VARIABLE,
        check_windows,
        memory_log,
        settle_accumulation,
        train,
    )
    from hf_memopt.recipes.reflow.workload import decided_home, planned_home

RANGES = {
    **dict.fromkeys(("steps", "batch_size"), COUNT),
    **dict.fromkeys(("num_workers", "log_freq", "save_freq"), COUNT_OR_ZERO),
    "seed": SEED,
    **dict.fromkeys(("policy.optimizer_lr", "policy.optimizer_weight_decay"), NOT_NEGATIVE),
    "policy.optimizer_grad_clip_norm": NOT_NEGATIVE,
}


def take_accumulation_flag(arguments: list[str]) -> tuple[int, list[str]]:
    """Split the recipe's own flag off the command line; without it, accelerate's environment variable counts."""
    value, others = take_flag(ACCUMULATION_FLAG, arguments)
    value = os.environ.get(ACCUMULATION_VARIABLE, "1") if value is None else value
    if not value.isdigit():
        raise ValueError(f"{ACCUMULATION_FLAG}={value!r} is not a whole number; pass e.g. --{ACCUMULATION_FLAG}=4")
    return int(value), others


def take_flag(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    return parser.parse_arg(name, arguments), parser.filter_arg(name, arguments)


def check_is_student(arguments: Sequence[str]) -> None:
    """Refuse a stock policy before lerobot refuses the flags of reflow, which its configuration does not have."""
    path, kind = parser.get_path_arg("policy", arguments), parser.get_type_arg("policy", arguments)
    if path is not None:
        kind = load_config(resolve_checkpoint(path)).type
    if kind in STOCK_TYPES:
        teacher = parser.parse_arg("policy.teacher_model_path", arguments) or path or f"<your fine-tuned {kind}>"
        raise ValueError(
            f"policy type {kind!r}: this recipe trains {kind}_reflow, which starts as its teacher's copy. Run "
            f"`hf-memopt prepare-student --teacher {teacher} --output outputs/student_init`, and pass "
            "--policy.path=outputs/student_init in place of --policy.type, --policy.path, --policy.use_reflow and "
            "--policy.teacher_model_path"
        )


def put_teacher(cfg: TrainPipelineConfig, home: str) -> None:
    """Have the run's teacher live there, also when lerobot's loop reads the policy's flags once more."""
    cfg.policy.teacher_offload = home
    sys.argv[1:] = [*parser.filter_arg("policy.teacher_offload", sys.argv[1:]), f"--policy.teacher_offload={home}"]


def halving(cfg: TrainPipelineConfig, num_accumulation_steps: int) -> dict[str, str]:
    """Return the flags for as many updates of as many samples in half the micro-batch, if a batch has two halves.

    lerobot counts batches everywhere, so that steps and the schedule's double.
    """
    if cfg.batch_size % 2:
        return {}
    flags = {"batch_size": cfg.batch_size // 2, ACCUMULATION_FLAG: 2 * num_accumulation_steps, "steps": 2 * cfg.steps}
    for name in ("scheduler_warmup_steps", "scheduler_decay_steps"):
        flags[f"policy.{name}"] = 2 * getattr(cfg.policy, name)
    words = " ".join(f"--{name}={value}" for name, value in flags.items())
    return {HALF_MICRO_BATCH: f"{words}: updates of the same samples in more forward passes"}


def check_dataset(dataset: DatasetConfig) -> None:
    """Read its metadata, so that data of another format are one line here and no traceback of the loop's."""
    names = {name: getattr(dataset, name) for name in ("root", "revision", "repo_type")}
    with reading_dataset(dataset.repo_id, dataset.root):
        LeRobotDatasetMetadata(dataset.repo_id, **names)


def main(arguments: Sequence[str] | None = None) -> None:
    if arguments is not None:
        sys.argv[1:] = arguments
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(__doc__)
    num_accumulation_steps, sys.argv[1:] = take_accumulation_flag(sys.argv[1:])
    card, sys.argv[1:] = take_flag("plan", sys.argv[1:])
    check_card(card)
    check_is_student(sys.argv[1:])
    cfg = read_training_flags()
    if not is_student(cfg.policy):
        kind = None if cfg.policy is None else cfg.policy.type
        raise ValueError(
            f"policy type {kind!r}: this recipe trains {' and '.join(f'{name}_reflow' for name in STOCK_TYPES)}"
        )
    cfg.policy.check_start()
    for name, allowed in RANGES.items():
        allowed.check(name, attrgetter(name)(cfg))
    check_dataset(cfg.dataset)
    num_accumulation_steps = settle_accumulation(cfg, num_accumulation_steps)
    check_windows(cfg, num_accumulation_steps)
    if card is not None and cfg.policy.pretrained_path is None:
        raise ValueError(f"plan={card} simulates the student that --policy.path names; pass one, or leave --plan out")
    # lerobot sets logging up later.
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_memopt").setLevel(logging.INFO)
    given = cfg, num_accumulation_steps
    put_teacher(cfg, decided_home(*given) if card is None else planned_home(*given, card))
    with warnings.catch_warnings():
        # The schedule counts batches, so it moves before the first update; torch takes that for a mistake.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        flags = {OFFLOADING: "--policy.activation_offload=auto", **halving(cfg, num_accumulation_steps)}
        with explain_oom(output_dir=cfg.output_dir, flags=flags):
            train(cfg, num_accumulation_steps, memory_log(cfg))


if __name__ == "__main__":
    sys.exit(one_line_errors("reflow_smolvla", main))
