"""`hf-memopt verify`: its runs, refusals and answers. Scripts in this process: callbacks/test_recorded_script.py."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from refused import refused

from hf_memopt.cli import main
from hf_memopt.exactness.recording import Fingerprint, Phase, Recording, TensorPlace

Capture = pytest.CaptureFixture[str]
recorded_script = LateModule("hf_memopt.callbacks.recorded_script")
MODULE = "hf_memopt.callbacks.recorded_script"
TOYS = Path(__file__).parents[1] / "toys"

STEP: dict[tuple[int, Phase, str], float] = {
    (0, "start", "w"): 1.0,
    (1, "loss", "loss"): 2.0,
    (1, "gradient", "w"): 3.0,
    (1, "weight", "w"): 0.5,
}


def recording(**changed: float) -> Recording:
    """Return a recording of a step; a phase may have another value."""
    tensors = {}
    for (step, phase, name), value in STEP.items():
        place = TensorPlace(step, int(phase in ("loss", "gradient")), phase, name)
        tensors[place] = Fingerprint.of(torch.tensor(changed.get(phase, value)))
    return Recording(tensors, peak_bytes=2**20, step_s=[0.5])


class Runs:
    """Stands for processes: each run writes the recordings that `answers` has for its kind, and a log."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.orders: list[Any] = []
        self.answers: dict[str, Sequence[Recording] | int] = {}
        self.mistake = ""

    def __call__(self, command: list[str], env: dict[str, str], stdout: Any, stderr: int) -> Any:
        self.commands.append(command)
        self.environments.append(env)
        order = recorded_script.Order(**json.loads(env[recorded_script.ORDER_VARIABLE]))
        self.orders.append(order)
        kind = Path(order.folder).name
        print(f"log of {kind}", file=stdout)
        answer = self.answers.get(kind, [recording()])
        status = answer if isinstance(answer, int) else 0
        for rank, found in enumerate([] if isinstance(answer, int) else answer):
            found.write(recorded_script.recording_file(Path(order.folder), rank))
        if self.mistake:
            recorded_script.mistake_file(Path(order.folder)).write_text(self.mistake)
            status = 1
        return subprocess.CompletedProcess(command, status)

    @property
    def kinds(self) -> list[str]:
        return [Path(order.folder).name for order in self.orders]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    made = Runs()
    monkeypatch.setattr("subprocess.run", made)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return made


def verify(*words: str) -> int:
    return main(["verify", "--switch", "bf16=true", *words, "--", "train.py", "--lr", "1"])


def test_equal_runs(runs: Runs, capsys: Capture) -> None:
    assert verify() == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "equal, bit for bit, over 1 step and 1 gradient"
    assert lines[2].split() == ["run", "peak", "MiB", "s", "/", "step", "s", "of", "recording"]
    assert re.sub(r"[\d.]+ s\n", "_\n", captured.err) == "plain: _\nswitched: _\nplain again: _\n"
    assert runs.kinds == ["plain", "switched", "plain-again"]


def test_what_a_run_gets(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    switches = ["gradient_checkpointing=true", "env:MARK=on", "script:--packed", "script:x"]
    flags = [word for switch in switches for word in ("--switch", switch)]
    words = [*flags, "--num_processes", "2", "--seed=3", "--cpu", "--steps", "4", "--mixed_precision=bf16"]
    assert main(["verify", *words, "--", "-m", "pack.train", "--switch", "its own", "--", "--help"]) == 0
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "2", "--cpu"]
    script = ["-m", "pack.train", "--switch", "its own", "--", "--help"]
    plain = [*launcher, "--mixed_precision=bf16", "-m", MODULE, *script]
    assert runs.commands == [plain, [*plain, "--packed", "x"], plain]
    assert [order.is_switched for order in runs.orders] == [False, True, False]
    assert {(order.num_steps, order.seed, order.perturbed) for order in runs.orders} == {(4, 3, None)}
    assert runs.orders[0].switches == switches
    assert [environment.get("MARK") for environment in runs.environments] == [None, "on", None]
    assert {environment["PYTHONHASHSEED"] for environment in runs.environments} == {"3"}
    assert {environment["CUBLAS_WORKSPACE_CONFIG"] for environment in runs.environments} == {":16:8"}
    assert not any(Path(order.folder).exists() for order in runs.orders)


def test_different_runs(runs: Runs, capsys: Capture) -> None:
    runs.answers["switched"] = [recording(gradient=6.0)]
    assert verify() == 1
    printed = capsys.readouterr().out
    assert printed.startswith(
        "different, not by rounding, first in gradient of w after backward of micro-batch 1 of st"
    )
    assert "look at: the forward pass is equal and backward is not" in printed
    assert runs.kinds == ["plain", "switched", "plain-again", "plain-rounded-once"]
    assert runs.orders[-1].perturbed == "float64"
    assert not runs.orders[-1].is_switched


def test_rounding_is_no_equality(runs: Runs, capsys: Capture) -> None:
    runs.answers["switched"] = [recording(gradient=3.0 + 2**-22)]
    assert verify() == 1
    assert capsys.readouterr().out.startswith("equal but for rounding, first in gradient of w")


def test_a_plain_run_that_does_not_repeat_itself(runs: Runs, capsys: Capture) -> None:
    runs.answers["plain-again"] = [recording(loss=2.5)]
    assert verify() == 2
    printed = capsys.readouterr().out
    assert printed.startswith("not repeatable: two plain runs differ, first in loss of micro-batch 1 of step 1\n")
    assert "  look at: the forward pass draws random numbers that no seed reaches" in printed
    assert runs.kinds == ["plain", "switched", "plain-again"]


@pytest.mark.parametrize("is_equal", [True, False])
def test_json_is_alone_on_standard_output(is_equal: bool, runs: Runs, capsys: Capture) -> None:
    runs.answers["switched"] = [recording(loss=2.0 if is_equal else float("inf"))]
    assert verify("--json") == (0 if is_equal else 1)

    def refuse(constant: str) -> None:
        pytest.fail(f"JSON has no {constant}")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["equal"] is is_equal
    assert [run["name"] for run in found["runs"]][:3] == ["plain", "switched", "plain again"]
    assert found["runs"][0]["peak_bytes"] == 2**20


def test_ranks_are_compared_together(runs: Runs, capsys: Capture) -> None:
    runs.answers = {kind: [recording(), recording()] for kind in ("plain", "plain-again", "plain-rounded-once")}
    runs.answers["switched"] = [recording(), recording(loss=9.0)]
    assert verify() == 1
    assert "first in rank 1: loss of micro-batch 1 of step 1" in capsys.readouterr().out


@pytest.mark.parametrize(("failing", "shown"), [("plain", ["plain"]), ("switched", ["plain", "switched"])])
def test_a_failing_script(failing: str, shown: list[str], runs: Runs, capsys: Capture) -> None:
    runs.answers[failing] = 3
    assert verify() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith(f"The {failing} run ended with status 3; its log is above.\n")
    found = re.findall(r"^--- (.*): the last lines of its log\nlog of (.*)$", captured.err, re.MULTILINE)
    assert [name for name, _ in found] == [log for _, log in found] == shown


def test_a_script_without_a_training_step(runs: Runs, capsys: Capture) -> None:
    runs.answers["plain"] = [Recording()]
    assert verify() == 2
    assert "The plain run made no training step: nothing ran backward. Its log is above." in capsys.readouterr().err


def test_a_switch_that_the_script_refuses_is_one_line_before_the_second_run(runs: Runs, capsys: Capture) -> None:
    runs.mistake = "switch=bf16=true: C has no such field"
    assert verify() == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "hf-memopt verify: error: switch=bf16=true: C has no such field"
    assert runs.kinds == ["plain"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--switch bf16=true", "-- and a script must follow the flags: hf-memopt verify --switch SWITCH"),
        ("--switch bf16=true --", "-- and a script must follow the flags"),
        ("--switch bf16=true -- missing.py", "SCRIPT='missing.py' is not a file; check the path"),
        ("-- train.py", "the following arguments are required: --switch; --help lists all options"),
        ("--switch bf16 -- train.py", "switch='bf16' is none; use FIELD=VALUE"),
        ("--switch torch:no.flag=1 -- train.py", "there is no flag torch.no.flag"),
        ("--switch offload=never -- train.py", "switch=offload=never: .*choose from"),
        ("--switch bf16=true --steps 0 -- train.py", "argument --steps: 0 must be at least 1"),
        ("--switch bf16=true --steps two -- train.py", "argument --steps: invalid int value: 'two'"),
        ("--switch bf16=true --seed -1 -- train.py", "argument --seed: -1 must be at least 0"),
    ],
)
def test_a_mistake_is_one_line(words: str, complaint: str, runs: Runs, capsys: Capture) -> None:
    (line,) = refused(capsys, "verify", *words.split()).splitlines()
    assert re.search(complaint, line), line
    assert runs.commands == []


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(flag: str, runs: Runs, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        main(["verify", flag])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("--switch", "--steps", "--seed", "--json", "FIELD=VALUE", "torch:MODULE"))


# Whole runs: three or four processes each.


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    monkeypatch.chdir(tmp_path)
    paths = [str(tmp_path), *map(str, (TOYS, TOYS.parent)), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        flags = ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
        return subprocess.run(
            [sys.executable, "-m", "hf_memopt.cli", "verify", *flags, *words],
            capture_output=True,
            text=True,
            env=environment,
        )

    return run


@pytest.mark.e2e
@pytest.mark.slow
def test_trls_sft_with_lora_and_checkpointing(command: Any, tmp_path: Path) -> None:
    script = (TOYS / "sft_script.py").read_text()
    adapted = script.replace("        train_dataset=", "        peft_config=LoraConfig(r=4),\n        train_dataset=")
    (tmp_path / "lora.py").write_text("from peft import LoraConfig\n" + adapted)
    done = command(
        *(
            "--cpu",
            "--num_processes=1",
            "--switch",
            "gradient_checkpointing=true",
            "--json",
            "--",
            "lora.py",
            str(tmp_path),
        )
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["headline"] == f"equal, bit for bit, over 2 steps and {found['num_gradients']} gradients"
    assert found["compared"]["gradient"] == 2 * found["num_gradients"] > 8
    assert found["compared"]["optimizer"] > 0
    assert not (tmp_path / "out").exists()


LOOP = """
import os, sys
import torch
from accelerate import Accelerator
from offload_trainers import examples
from tiny_decoders import tiny_decoder
accelerator = Accelerator(cpu=True)
model, optimizer = tiny_decoder(), None
if "checkpointing" in sys.argv:
    model.gradient_checkpointing_enable()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
rank = accelerator.process_index
for row in examples()[rank:4:2]:
    tokens = row["input_ids"][None]
    if os.environ.get("BROKEN") == str(rank):
        tokens = tokens.flip(1)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
sys.exit(0)
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_a_loop_of_two_ranks_in_a_module_that_exits(command: Any, tmp_path: Path) -> None:
    (tmp_path / "two_ranks.py").write_text(LOOP)
    switches = ("--switch", "env:BROKEN=1", "--switch", "script:checkpointing")
    # accelerate launch starts a single process with --cpu; the script asks for the CPU itself.
    done = command("--multi_gpu", "--num_processes=2", *switches, "--", "-m", "two_ranks")
    assert done.returncode == 1, done.stderr
    assert "first in input rank 1: input_ids of micro-batch 1 of step 1" in done.stdout.splitlines()[0]
    assert re.search(r"0 of \d\d+ weights at the start; 4 of 8 inputs", done.stdout), done.stdout


TRAINER = """
import sys
import transformers
from offload_trainers import STEPS, decoder, examples
arguments = transformers.TrainingArguments(**{**STEPS, "eval_strategy": "no", "output_dir": "out"})
trainer = transformers.Trainer(decoder(), arguments, train_dataset=examples())
if "fails" in sys.argv:
    raise RuntimeError("it fails")
trainer.train()
"""
DRAWN_AGAIN = ("--switch", 'gradient_checkpointing_kwargs={"use_reentrant": false, "preserve_rng_state": false}')


@pytest.mark.e2e
@pytest.mark.slow
def test_masks_that_are_drawn_again_in_training(command: Any, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    words = ("--cpu", "--num_processes=1", "--switch", "gradient_checkpointing=true", *DRAWN_AGAIN, "--", "trainer.py")
    done = command(*words)
    assert done.returncode == 1, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert re.fullmatch(
        r"different, not by rounding, first in gradient of model.layers.1.\S+ after.*, after eq.*", first
    )
    assert "masks were drawn again" in done.stdout
    assert last.startswith("plain, rounded once ")


@pytest.mark.e2e
@pytest.mark.slow
def test_a_script_that_fails(command: Any, tmp_path: Path) -> None:
    """Fail in the first run; that the logs of two are shown, test_a_failing_script tells without processes."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    words = ("--cpu", "--num_processes=1", "--switch", "gradient_checkpointing=true", "--", "trainer.py", "fails")
    done = command(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "--- plain: the last lines of its log\n" in done.stderr
    assert "RuntimeError: it fails" in done.stderr
    assert done.stderr.splitlines()[-1] == "The plain run ended with status 1; its log is above."
