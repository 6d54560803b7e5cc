"""Shared parts of the reflow demos: their folder, their flags, and the commands that they print and run."""

import argparse
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Where FFmpeg is missing, importing lerobot prints five tracebacks, and no demo has videos. Demos import this first.
logging.getLogger("lerobot.utils.import_utils").setLevel(logging.ERROR)

from hf_memopt.command_line import Parser, check_output_folder, number  # noqa: E402
from hf_memopt.ranges import Range  # noqa: E402

_SEED = Range(at_least=0, at_most=2**31 - 1, whole=True)  # others are counted from it
BATCH_SIZE = 16
LEARNING_RATE = 3e-3


def demo_parser(description: str | None, output: str) -> Parser:
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, default=Path(output), help="folder for everything (default: %(default)s)")
    add("--seed", type=number(_SEED), default=0, help="of data and training (default: %(default)s)")
    add("--overwrite", action="store_true", help="first remove what an earlier demo wrote to the folder")
    return parser


def make_room(output: Path, names: Sequence[str], overwrite: bool) -> None:
    """Refuse a folder that is in use; with `overwrite`, remove the files of a demo, `names`, and nothing else."""
    check_output_folder("output", output)
    present = [name for name in names if (output / name).exists()]
    if present and not overwrite:
        raise ValueError(
            f"output={str(output)!r} already holds {', '.join(present)}; replace them with --overwrite or name another"
        )
    for name in present:
        path = output / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (output / "logs").mkdir(parents=True)


def reflow_launch(student: Path) -> list[Any]:
    return [
        *("accelerate", "launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no"),
        *("--dynamo_backend=no", "-m", "hf_memopt.recipes.reflow_smolvla", f"--policy.path={student}"),
    ]


def training_flags(
    output: Path,
    steps: int,
    warmup_steps: int,
    seed: int,
    *,
    learning_rate: float = LEARNING_RATE,
    batch_size: int = BATCH_SIZE,
) -> list[str]:
    return [
        # Two processes read data while another trains; forking them spares further imports of everything.
        "--num_workers=2",
        f"--dataloader_multiprocessing_context={'fork' if sys.platform == 'linux' else 'spawn'}",
        f"--output_dir={output}",
        f"--batch_size={batch_size}",
        f"--steps={steps}",
        f"--save_freq={steps}",
        f"--log_freq={max(1, steps // 30)}",
        f"--seed={1000 + seed}",
        f"--policy.optimizer_lr={learning_rate}",
        f"--policy.scheduler_warmup_steps={warmup_steps}",
        f"--policy.scheduler_decay_steps={steps}",
    ]


def run(output: Path, name: str, command: Sequence[Any]) -> str:
    """Run a command of this environment; show its progress bars, keep its whole output in logs/ and return it."""
    words = [str(word) for word in command]
    print("$", shlex.join(words), flush=True)
    words[0] = str(Path(sys.executable).parent / words[0])
    # Models of this size get slower with more threads.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = output / "logs" / f"{name}.log"
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        text = b""
        while chunk := os.read(process.stdout.fileno(), 2**16):
            text += chunk
            show_progress(chunk)
    log.write_bytes(text)
    decoded = text.decode(errors="replace")
    if process.returncode:
        print(decoded[-3000:])
        sys.exit(f"demo: the command failed with status {process.returncode}; its whole output is in {log}")
    return decoded


def show_progress(chunk: bytes) -> None:
    bars = re.findall(rb"(?:Training|evaluate \w+): [^\r\n]*\]", chunk)
    if bars:
        print("\r" + bars[-1].decode(errors="replace")[:110], end="", flush=True)
        if b"100%" in bars[-1]:
            print(flush=True)


@contextmanager
def stage(title: str) -> Iterator[None]:
    print(f"\n=== {title}", flush=True)
    begun = time.perf_counter()
    yield
    print(f"    {time.perf_counter() - begun:.0f} s", flush=True)
