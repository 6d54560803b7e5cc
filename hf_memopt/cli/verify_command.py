"""`hf-memopt verify`: a script with and without a switch that saves memory, compared bit by bit."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_memopt.cli.launch_command import check_script, cut_at_script, flags_parser
from hf_memopt.command_line import Parser, number
from hf_memopt.process_trees import COMMAND
from hf_memopt.ranges import COUNT, SEED

if TYPE_CHECKING:
    from hf_memopt.callbacks.recorded_script import Switches
    from hf_memopt.exactness.recording import Recording
    from hf_memopt.exactness.runs import Kind

_USAGE = "hf-memopt verify --switch SWITCH [--switch SWITCH ...] [FLAGS] -- SCRIPT [ARGUMENTS]"
_DESCRIPTION = """\
Run SCRIPT, or -m MODULE, with and without switches that save memory, and compare inputs, losses, gradients
after each backward pass, weights and optimizer states after each update, bit by bit."""
_EPILOG = """\
A SWITCH is one of

  FIELD=VALUE              a field of the script's TrainingArguments or TRL config: gradient_checkpointing=true,
                           'gradient_checkpointing_kwargs={"use_reentrant": true}', optim=adamw_bnb_8bit
  FIELD=VALUE              a flag of hf-memopt launch: offload=all, base=file. On a CPU offloading performs its copies
  env:NAME=VALUE           an environment variable: env:ACCELERATE_USE_FSDP=true
  torch:MODULE.FLAG=VALUE  a flag of torch: torch:_functorch.config.activation_memory_budget=0.5
  script:WORD              a word for the script's own command line: script:--attention=sdpa

Other FLAGS are those of accelerate launch. The script runs three times: plain, switched, and plain again as a control.
Where the switched run differs, one or two more runs show how far rounding reaches: both in float32 if they compute in
lower precision, or else the plain one with weights changed by one rounding. Each run stops after --steps. A script's
Trainer saves, evaluates and reports nothing meanwhile.

The exit status is 0 if all bits are equal, 1 if they differ, by rounding too, and 2 if they could not be compared.

example: hf-memopt verify --switch gradient_checkpointing=true -- train.py --learning_rate 1e-4"""
_LINES_OF_LOG = 30


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "verify",
        help="run a training script with and without a memory switch, anybody's, and compare both bit by bit",
        prefix_chars="\0",  # so that argparse leaves all words to the parser of flags, accelerate and the script
        add_help=False,
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _flags() -> Parser:
    parser = flags_parser("verify", _USAGE, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "--switch", action="append", required=True, metavar="SWITCH", help="repeat it for several; see below"
    )
    parser.add_argument(
        "--steps",
        type=number(COUNT),
        default=2,
        metavar="N",
        help="compare so many steps; a step ends with the first forward pass after an update (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=number(SEED),
        default=0,
        metavar="N",
        help="of all generators before the script begins (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    return parser


def _run(parsed: argparse.Namespace) -> int:
    words, script = cut_at_script(parsed.words)
    flags, accelerates = _flags().parse_known_args(words)
    check_script(script, _USAGE)
    from hf_memopt.callbacks.recorded_script import Switches
    from hf_memopt.exactness.runs import compare_runs

    with tempfile.TemporaryDirectory(prefix="hf-memopt-verify-") as folder:
        switches = Switches.from_texts(flags.switch)
        runs = ScriptRuns(Path(folder), accelerates, script, flags.switch, switches, flags.steps, flags.seed)
        try:
            report = compare_runs(runs.record)
        except RunError as error:
            print(f"{runs.logs()}\n{error}", file=sys.stderr)
            return 2
    print(json.dumps(report.to_dict(), indent=2) if flags.json else report)
    if report.verdict == "not repeatable":
        return 2
    return 0 if report.equal else 1


class RunError(Exception):
    """A run of the script that ended with an error, or that recorded nothing."""


@dataclass
class ScriptRuns:
    """Runs of one script, each in processes of its own, with a log each."""

    folder: Path
    accelerates: list[str]
    script: list[str]
    texts: list[str]
    switches: "Switches"
    num_steps: int
    seed: int

    def record(self, kind: "Kind", dtype: str | None) -> "Recording":
        """Run the script and return the recording of all its ranks; ValueError: it has no use for a switch."""
        from hf_memopt.callbacks.recorded_script import ORDER_VARIABLE, Order, mistake_file, recording_file
        from hf_memopt.exactness.recording import Recording
        from hf_memopt.exactness.runs import is_in_float32, is_switched, merged

        has_switches = is_switched(kind)
        folder = self.folder / kind.replace(", ", " ").replace(" ", "-")
        folder.mkdir()
        order = Order(str(folder), self.num_steps, dtype, is_in_float32(kind), self.seed, self.texts, has_switches)
        environment = {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it, matrix products on CUDA are not deterministic
            "PYTHONHASHSEED": str(self.seed),
            **os.environ,
            **(self.switches.environment if has_switches else {}),
            ORDER_VARIABLE: json.dumps(vars(order)),
            COMMAND: str(os.getpid()),
        }
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *self.accelerates]
        words = [*self.script, *(self.switches.script if has_switches else [])]
        command = [*launcher, "-m", "hf_memopt.callbacks.recorded_script", *words]
        sys.stderr.write(f"{kind}: ")
        sys.stderr.flush()
        began = time.perf_counter()
        with (self.folder / f"{kind}.log").open("w", encoding="utf-8") as log:
            status = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
        sys.stderr.write(f"{time.perf_counter() - began:.1f} s\n")
        if mistake_file(folder).exists():
            raise ValueError(mistake_file(folder).read_text(encoding="utf-8"))
        num_ranks = sum(file.suffix == ".json" for file in folder.iterdir())
        if status or not num_ranks:
            raise RunError(f"The {kind} run ended with status {status}; its log is above.")
        found = merged([Recording.read(recording_file(folder, rank)) for rank in range(num_ranks)])
        if not any(place.phase == "loss" for place in found.tensors):
            raise RunError(f"The {kind} run made no training step: nothing ran backward. Its log is above.")
        return found

    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log"), key=lambda file: file.stat().st_mtime)
        lines = []
        for file in dict.fromkeys([files[0], files[-1]]):
            log = file.read_text(encoding="utf-8", errors="replace")
            lines += [f"--- {file.stem}: the last lines of its log", *log.splitlines()[-_LINES_OF_LOG:]]
        return "\n".join(lines)
