"""Runs a script as `every_trainer` does and records its training steps, for `hf-memopt verify`."""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate.commands.launch
import torch
from accelerate import Accelerator
from torch import nn
from transformers import set_seed

from hf_memopt.callbacks.arguments import MemoptArguments
from hf_memopt.callbacks.every_trainer import NOTHING_ATTACHED, Attached, attached, run_script, show_messages
from hf_memopt.callbacks.switches import SwitchedArguments, SwitchError, Switches, joined, set_torch_flags
from hf_memopt.exactness.recorder import Recorder, RecordingEnds
from hf_memopt.exactness.recording import Recording
from hf_memopt.process_trees import end_with_command
from hf_memopt.training.repeatable import deterministic_kernels

# Holds an `Order` as JSON.
VARIABLE = "HF_MEMOPT_RECORD"
# A run of a few steps leaves nothing behind.
_FORCED = {
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "load_best_model_at_end": False,
    "push_to_hub": False,
}
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Order:
    folder: str  # each rank writes `rank-N.json` into it
    num_steps: int
    perturbed: str | None  # name of a dtype: each weight is changed by one unit in its last place; None: no change
    in_float32: bool  # whether autocast and TF32 are off
    seed: int  # of all generators before the script begins
    switches: list[str]  # their texts
    is_switched: bool  # whether they are on; in a plain run their names and values are only checked


def recording_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def mistake_file(folder: Path) -> Path:
    """Return the file that holds the message if a switch was wrong."""
    return folder / "mistake.txt"


def main(words: Sequence[str]) -> None:
    order = Order(**json.loads(os.environ[VARIABLE]))
    end_with_command(removing=Path(order.folder).parent)
    show_messages()
    set_seed(order.seed)
    try:
        recording = _recorded(order, words)
    except SwitchError as error:
        mistake_file(Path(order.folder)).write_text(str(error), encoding="utf-8")
        raise
    recording.write(recording_file(Path(order.folder), int(os.environ.get("RANK", "0"))))


def _recorded(order: Order, words: Sequence[str]) -> Recording:
    switches = Switches.from_texts(order.switches)
    memopt = switches.make_memopt() if order.is_switched else None
    if order.is_switched:
        set_torch_flags(switches.torch_flags)
    else:
        switches.check_that_they_change()
    recorder = Recorder(order.num_steps, perturbed=order.perturbed, in_float32=order.in_float32)
    with ExitStack() as stack:
        enter = stack.enter_context
        # In the command's own folder, which goes with it.
        output = enter(tempfile.TemporaryDirectory(dir=Path(order.folder).parent))
        forced = {**_FORCED, "output_dir": output}
        arguments = SwitchedArguments(
            switches.arguments, forced, is_switched=order.is_switched, must_change=switches.are_fields_alone
        )
        arguments.install()
        enter(deterministic_kernels())
        found = Attached() if memopt is None else enter(attached(memopt))
        enter(patch.object(accelerate.commands.launch, "launch_command", _refuse_launch))
        enter(_models_named(recorder))
        try:
            with recorder:
                run_script(words)
        except RecordingEnds:
            pass
        except SystemExit as end:  # of a script that has ended well
            if end.code not in (None, 0):
                raise
        if switches.arguments and not arguments.were_used:
            name, value = next(iter(switches.arguments.items()))
            raise SwitchError(
                f"switch={name}={value} reaches nothing: the script makes no TrainingArguments or TRL config; use "
                "script:WORD, env:NAME=VALUE or torch:MODULE.FLAG=VALUE"
            )
        if memopt is not None:
            _check_effect(switches, memopt, found)
    return recorder.recording


def _refuse_launch(*args: Any) -> None:
    raise SwitchError(
        "the script starts another one in processes that are not recorded; name that one, such as -m trl.scripts.sft "
        "for trl sft"
    )


def _check_effect(switches: Switches, memopt: MemoptArguments, found: Attached) -> None:
    if not found.is_any:
        raise SwitchError(f"switch={joined(switches.ours)} reaches nothing: {NOTHING_ATTACHED}")
    if found.unreached:
        raise SwitchError(f"switch={found.unreached[0]}")
    if found.optimizers is not None and found.optimizers.unreached:
        raise SwitchError(f"switch={found.optimizers.unreached}")
    if memopt.offload != "off" and not any(each.stats.bytes_moved for each in found.offloaders):
        raise SwitchError(
            f"switch=offload={memopt.offload} moved no bytes: storages below offload_threshold_mb="
            f"{memopt.offload_threshold_mb:g} MiB stay; add --switch offload_threshold_mb=0"
        )


@contextmanager
def _models_named(recorder: Recorder) -> Iterator[None]:
    """Name parameters after the models that a script prepares, whose parts it may call before."""
    prepare = Accelerator.prepare

    @functools.wraps(prepare)
    def prepare_and_name(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        for model in args:
            if isinstance(model, nn.Module):
                recorder.add_model(model)
        if accelerator.mixed_precision in _PRECISIONS:
            recorder.note_precision(_PRECISIONS[accelerator.mixed_precision])
        return prepare(accelerator, *args, **kwargs)

    with patch.object(Accelerator, "prepare", prepare_and_name):
        yield


if __name__ == "__main__":
    main(sys.argv[1:])
