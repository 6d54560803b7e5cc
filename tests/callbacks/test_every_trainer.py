"""Tests that scripts without code for this library get offloading, and the plain run's losses and weights."""

import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients import equal
from late_imports import LateModule
from offload_trainers import decoder, examples, weights
from torch import Tensor, nn

from hf_memopt.weights.base import streamed_weights_of

callbacks = LateModule("hf_memopt.callbacks")
every_trainer = LateModule("hf_memopt.callbacks.every_trainer")
accelerate = LateModule("accelerate")
transformers = LateModule("transformers")

SCRIPT = Path(__file__).parents[1] / "toys" / "sft_script.py"
SETTINGS = "offload_threshold_mb=0,cpu_copies=true"


def arguments(**given: Any) -> Any:
    return callbacks.MemoptArguments(**{"offload_threshold_mb": 0.0, "cpu_copies": True, **given})


def offload_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "moved to the host" in text or "moved nothing" in text]


@pytest.fixture(autouse=True)
def shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_memopt")


def test_a_trainer_is_attached_to_where_it_is_made(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    plain = make()
    plain.train()
    with every_trainer.attached(arguments()):
        trainer = make()
        trainer.train()
    assert equal(weights(trainer), weights(plain))
    assert "compute_loss_context_manager" in vars(trainer)
    assert "compute_loss_context_manager" not in vars(plain)
    # The trainer's own Accelerator did not wrap the model a second time.
    (line,) = offload_lines(caplog)
    assert "moved to the host" in line


def frozen_in_part() -> Any:
    model: Any = decoder()
    model.model.layers[0].requires_grad_(False)
    return model


def test_a_base_streams_before_the_trainer_moves_the_model(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make(frozen_in_part())
    plain.train()
    streamed_when_moved = []
    move = transformers.Trainer._move_model_to_device

    def recording(trainer: Any, model: nn.Module, device: Any) -> None:
        streamed_when_moved.append(streamed_weights_of(model))
        move(trainer, model, device)

    monkeypatch.setattr(transformers.Trainer, "_move_model_to_device", recording)
    with every_trainer.attached(arguments(base="file", base_budget_gib=0.25)):
        trainer = make(frozen_in_part())
        trainer.train()
        (streamed,) = streamed_when_moved
        assert streamed is streamed_weights_of(trainer.model)
        assert "within the budget" in streamed.report().resident
        with pytest.raises(
            ValueError, match="base='file' needs a trainer that is given its model; leave model_init out"
        ):
            make(model_init=decoder)
        with pytest.raises(ValueError, match="base='file': model has no frozen weights"):
            make()
    assert all(map(torch.equal, trainer.model.state_dict().values(), plain.model.state_dict().values()))


def test_a_script_that_attaches_itself_is_refused(make: Any) -> None:
    with every_trainer.attached(arguments()):
        trainer = make()
        with pytest.raises(ValueError, match=r"has an attached offloader already; remove\(\)"):
            callbacks.attach(trainer)


def test_afterwards_nothing_is_attached_any_more(make: Any) -> None:
    before = transformers.Trainer.__init__, accelerate.Accelerator.prepare
    with pytest.raises(SystemExit), every_trainer.attached(arguments()):
        sys.exit(0)
    assert (transformers.Trainer.__init__, accelerate.Accelerator.prepare) == before
    assert "train" not in vars(make())


def trained_by_accelerate(
    *prepared_besides: nn.Module, calls_forward: bool = False, prepares_optimizer: bool = True
) -> list[Tensor]:
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    given = optimizer if prepares_optimizer else None
    model, prepared, *_ = accelerator.prepare(model, given, *prepared_besides)
    optimizer = prepared or optimizer
    for row in examples()[:6]:
        batch = {name: value[None] for name, value in row.items()}
        accelerator.backward((model.forward if calls_forward else model)(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("calls_forward", [False, True], ids=["", "which calls forward itself"])
def test_a_loop_on_accelerate_offloads_what_its_model_saves(
    calls_forward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = trained_by_accelerate()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with every_trainer.attached(arguments(offload="all")):
        assert equal(trained_by_accelerate(frozen, calls_forward=calls_forward), plain)
    (line,) = offload_lines(caplog)  # the frozen model has no offloader
    assert "moved to the host" in line
    caplog.clear()
    with every_trainer.attached(arguments(offload="off")):
        assert equal(trained_by_accelerate(), plain)
    assert offload_lines(caplog) == []


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_loop_on_accelerate_has_its_optimizers_state_at_home(
    home: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plain = trained_by_accelerate()
    with every_trainer.attached(arguments(offload="off", optimizer_home=home, disk=str(tmp_path))):
        assert equal(trained_by_accelerate(), plain)
    (line,) = (text for text in caplog.messages if text.startswith("optimizer: "))
    assert "6 updates read" in line
    assert (f"disk={tmp_path}" in line) == (home == "file")
    caplog.clear()
    with every_trainer.attached(arguments(offload="off", optimizer_home=home)):
        assert equal(trained_by_accelerate(prepares_optimizer=False), plain)
    assert f"optimizer_home={home} reaches no optimizer that is stepped; give it to Accelerator.prepare" in caplog.text


def test_engines_that_place_an_optimizers_state_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", accelerate.DistributedType.FSDP)
    with every_trainer.attached(arguments(optimizer_home="host")):
        with pytest.raises(ValueError, match=r"^optimizer_home='host': FSDP places the optimizer's state already"):
            accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW(decoder().parameters()))


UNREACHED = {
    "frozen": ("swap", "teacher = OffloadedTeacher(module, device=...), enter teacher.onload() around its calls"),
    "leak_check": (True, "MemoryLogger"),
    "memory_report": (True, "MemoryLogger"),
}


@pytest.mark.parametrize("flag", UNREACHED)
def test_a_loop_on_accelerate_hears_which_flags_do_not_reach_it(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    value, remedy = UNREACHED[flag]
    with every_trainer.attached(arguments(**{flag: value})):
        trained_by_accelerate()
        trained_by_accelerate()
    (line,) = (text for text in caplog.messages if "reaches Trainers alone" in text)
    assert line.startswith(f"{flag}={value} reaches Trainers alone, not this loop on Accelerate; in the loop")
    assert remedy in line


@pytest.mark.parametrize("ending", [None, SystemExit(0), ValueError("the script's own")])
def test_a_script_that_nothing_is_attached_to_is_told_so(
    ending: BaseException | None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(type(ending)) if ending else nullcontext(), every_trainer.attached(arguments()):
        accelerate.Accelerator(cpu=True).prepare(nn.Linear(2, 2).requires_grad_(False))
        if ending:
            raise ending
    assert ("nothing was attached: " in caplog.text) == (not isinstance(ending, ValueError))


def test_a_model_that_is_prepared_twice_is_wrapped_once(caplog: pytest.LogCaptureFixture) -> None:
    with every_trainer.attached(arguments()):
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        accelerator.prepare(model)
    assert len(offload_lines(caplog)) == 1


def run(*command: str, **environment: str) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def results(file: Path) -> Any:
    return torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plain")
    run(str(SCRIPT), str(folder))
    return results(folder / "results.pt")


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["variable", "module", "launch"])
@pytest.mark.sweep(share=0.3)
def test_trls_sft_is_bitwise_the_plain_run(how: str, plain_run: Any, tmp_path: Path) -> None:
    module = "hf_memopt.callbacks.every_trainer"
    if how == "variable":
        printed = run("-m", module, str(SCRIPT), str(tmp_path), HF_MEMOPT=SETTINGS)
    elif how == "module":
        words = ("-m", module, "-m", SCRIPT.stem, str(tmp_path))
        printed = run(*words, HF_MEMOPT=f"offload=all,{SETTINGS}", PYTHONPATH=python_path(SCRIPT.parent))
    else:
        flags = ("--cpu", "--num_processes=1", "--offload_threshold_mb", "0", "--cpu_copies", "--optimizer_home=file")
        printed = run("-m", "hf_memopt.cli", "launch", *flags, "--", str(SCRIPT), str(tmp_path))
        assert "optimizer: " in printed
    assert "moved to the host" in printed
    assert "host: " in printed  # memory in the log
    losses, state = results(tmp_path / "results.pt")
    assert losses == plain_run[0]
    assert len(losses) == 4
    assert state.keys() == plain_run[1].keys()
    assert all(torch.equal(state[name], plain_run[1][name]) for name in state)


FROZEN_SCRIPT = """
import sys, warnings; warnings.simplefilter("ignore")
from pathlib import Path
import frozen_trainers, torch
trainer = getattr(frozen_trainers, sys.argv[1])(Path(sys.argv[2]))
torch.manual_seed(1)
trainer.train()
torch.save(trainer.model.state_dict(), Path(sys.argv[2]) / "results.pt")
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kind", "taken"), [("dpo", "ref_model (swap)"), ("grpo", "ref_model (swap), reward_funcs[0]")]
)
@pytest.mark.slow
def test_launch_takes_frozen_models_to_the_host(kind: str, taken: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FROZEN_SCRIPT)
    states = []
    for flags in ([], ["-m", "hf_memopt.cli", "launch", "--cpu", "--num_processes=1", "--frozen=swap", "--"]):
        folder = tmp_path / f"run-{len(states)}"
        folder.mkdir()
        printed = run(*flags, str(script), kind, str(folder), PYTHONPATH=python_path(SCRIPT.parents[1]))
        states.append(results(folder / "results.pt"))
    assert f"frozen='swap': {taken}" in printed
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def python_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.e2e
@pytest.mark.slow
def test_the_script_sees_what_python_shows_it(tmp_path: Path) -> None:
    """Check name, arguments, folder on the path, and exception with its traceback."""
    (tmp_path / "beside.py").write_text("NUMBER = 7\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(__name__, sys.argv, beside.NUMBER)\nraise ValueError('mine')\n")
    command = [sys.executable, "-m", "hf_memopt.callbacks.every_trainer", str(script), "--flag", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"__main__ {[str(script), '--flag', '--help']} 7\n"
    assert done.returncode == 1
    assert "line 3" in done.stderr
    assert done.stderr.endswith("ValueError: mine\n")


@pytest.mark.parametrize("words", [[], ["-m"]])
def test_without_a_script_it_says_what_is_missing(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_MEMOPT", raising=False)
    with pytest.raises(ValueError, match="name a SCRIPT and its arguments, or -m MODULE"):
        every_trainer.main(words)
