"""Tests that every option of every command, recipe and public name refuses bad values by name, before any work."""

import argparse
import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import hf_memopt
from hf_memopt import activations, checkpoint, memory, planning, training, weights
from hf_memopt.cli import _parser, main
from hf_memopt.command_line import one_line_errors
from hf_memopt.planning.job import FIELDS
from hf_memopt.ranges import Range, ranges_in

Capture = pytest.CaptureFixture[str]

NUMBERS = ("0", "-1", "1.5", "nan", "inf", str(2**70), "many")


def line_of(status: int, capsys: Capture) -> str:
    """Return the one line of a mistake, without other output."""
    captured = capsys.readouterr()
    assert status == 2, captured
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


# Commands with arguments, and bad values that are no numbers; PLACE/ holds `file` and a small configuration.
COMMANDS: dict[str, tuple[dict[str, str], list[str]]] = {
    "estimate": ({}, ["PLACE"]),
    "plan": ({"--gpu": "8GiB"}, ["PLACE"]),
    "prepare-student": ({"--teacher": "PLACE", "--output": "new"}, []),
    "precompute": ({"--output": "new"}, ["--", "--policy.path=x"]),
    "evaluate": ({"--policy": "PLACE", "--output": "new"}, []),
    "export": ({"--policy": "PLACE", "--output": "new"}, []),
    "doctor": ({}, []),
    "report": ({}, ["PLACE"]),
    "compare": ({}, ["lgt"]),
}
# Numbers that these options accept.
GOOD = {"--episodes": ("0", str(2**70)), "--max-grad-norm": ("1.5", str(2**70)), "--steps": (str(2**70),)}
BAD: dict[str, dict[str, tuple[str, ...]]] = {
    "estimate": {
        "--spec": ("missing", "PLACE", "PLACE/file"),
        "--model": ("PLACE/missing",),
        "--recipe": ("a.b", "../x"),
        "--training-args": ("missing", "PLACE", "PLACE/file"),
        "--trainer": ("x",),
        "--task": ("x",),
        "--dtype": ("x",),
        "--precision": ("x",),
        "--attention": ("x",),
        "--loss": ("x",),
        "--optimizer": ("x",),
        "--engine": ("x",),
        "--kbit-preparation": ("x", "peft"),
        "--optimizer-home": ("x",),
        "--optimizer-on": ("x", "host", "nvme"),
        "--weights-on": ("x", "host", "nvme"),
        "--encoders": ("x", "vae"),
        "--quantize": ("nf3", "nf4", "nf4-double", "nf4-experts", "int8-llm"),
        "--base": ("x", "host", "file"),
        "--base-budget": ("x", "-1GiB"),
        "--lora-targets": ("q_proj",),
        "--modules-to-save": ("nowhere",),
        "--adapters-dtype": ("x", "bfloat16"),
        "--image-size": ("x", "0", "3x", "224"),
        "--checkpointing": ("x",),
        "--offload": ("x", "auto"),
        "--gpu": ("x", "-8GiB"),
        "--host": ("x", "0GiB"),
        "--disk": ("x", "500GiB"),
        "--link": ("x",),
        "--reserve": ("x",),
        "--json": ("PLACE", "missing/file"),
        "--timeline": ("PLACE", "missing/file"),
        "--snapshot": ("PLACE", "missing/file"),
    },
    "plan": {
        "--spec": ("missing", "PLACE", "PLACE/file"),
        "--config": ("missing", "PLACE/file"),
        "--training-args": ("missing", "PLACE/file"),
        "--trainer": ("x",),
        "--model": ("PLACE/missing",),
        "--gpu": ("x",),
        "--host": ("x", "0GiB"),
        "--disk": ("x",),
        "--link": ("x",),
        "--reserve": ("x",),
        "--task": ("x",),
        "--dtype": ("x",),
        "--attention": ("x",),
        "--loss": ("x",),
        "--optimizer": ("x",),
        "--engine": ("x",),
        "--kbit-preparation": ("x", "peft"),
        "--optimizer-home": ("x",),
        "--optimizer-on": ("x", "host", "nvme"),
        "--weights-on": ("x", "host", "nvme"),
        "--encoders": ("x", "vae"),
        "--quantize": ("nf3", "nf4", "nf4-double", "nf4-experts", "int8-llm"),
        "--base": ("x", "host", "file"),
        "--base-budget": ("x", "-1GiB"),
        "--lora-targets": ("q_proj",),
        "--modules-to-save": ("nowhere",),
        "--adapters-dtype": ("x", "bfloat16"),
        "--image-size": ("x", "0", "3x", "224"),
        "--precision": ("x",),
        "--output": ("PLACE/file",),
        "--json": ("PLACE", "missing/file"),
        "--vary": ("x", "loss,x", ""),
        "--set": ("x",),
    },
    "prepare-student": {"--teacher": ("PLACE/missing",), "--output": ("PLACE/file", "PLACE/file/below")},
    "precompute": {"--output": ("PLACE/file",)},
    "evaluate": {
        "--policy": ("PLACE/missing",),
        "--output": ("PLACE/file",),
        "--device": ("x", "cuda:99"),
        "--env": ("x",),
    },
    "export": {
        "--policy": ("PLACE/missing",),
        "--output": ("PLACE/file", "PLACE"),
        "--evaluation": ("PLACE/missing", "PLACE", "PLACE/file"),
    },
    "doctor": {"--policy": ("PLACE/missing",), "--device": ("x", "cuda:99"), "--disk": ("PLACE/file",)},
    "report": {"--output": ("PLACE/file",)},
    "compare": {},
}
# Tested elsewhere: these options need other options or a loaded policy.
ELSEWHERE = {
    "estimate": {"--config", "--set"},
    "plan": {"--recipe"},
    "evaluate": {"--teacher", "--dataset-repo-id", "--dataset-root"},
    "export": {"--dataset-repo-id", "--dataset-root", "--push-to-hub"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    (place / "file").write_text("precious")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 8, "architectures": ["LlamaForCausalLM"], **sizes}
    (place / "config.json").write_text(json.dumps(config))
    return place


def options_of(command: str) -> dict[str, argparse.Action]:
    (commands,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    actions = commands.choices[command]._actions
    return {
        action.option_strings[0]: action
        for action in actions
        if action.option_strings and action.nargs != 0 and action.help != argparse.SUPPRESS
    }


def takes_numbers(action: argparse.Action) -> bool:
    if (field := FIELDS.get(action.dest)) is not None:
        return field.allowed is not None
    return action.type not in (None, Path)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_has_a_case(command: str) -> None:
    texts = {name for name, action in options_of(command).items() if not takes_numbers(action)}
    assert texts == {*BAD[command], *ELSEWHERE.get(command, ())}


@pytest.fixture(scope="module")
def imported() -> None:
    """Import lerobot's libraries, so that their warnings are over."""
    importlib.import_module("hf_memopt.lerobot.modeling_smolvla_reflow")


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_commands(command: str, place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    required, positional = COMMANDS[command]
    bad = BAD[command] | {name: NUMBERS for name, action in options_of(command).items() if takes_numbers(action)}
    for name, values in bad.items():
        for value in set(values) - set(GOOD.get(name, ())):
            named = required | {name: value}
            flags = [each for pair in named.items() for each in pair]
            arguments = [command, *flags, *([] if name in ("--config", "--model", "--recipe") else positional)]
            line = line_of(main([each.replace("PLACE", str(place)) for each in arguments]), capsys)
            assert line.startswith(f"hf-memopt {command}: error: ")
            shown = value.replace("PLACE", str(place))
            assert re.search(rf"\b{name.strip('-').replace('-', '[-_]')}\b|{re.escape(shown)}", line), (name, line)


RECIPES = {
    "train_causal_lm": "causal_lm.options",
    "train_neural_operator": "neural_operator.options",
    "train_fluxflow": "fluxflow.options",
    "train_lgt": "lgt.options",
}
# Texts that are checked only with opened data or models, or together with other options.
OPENED_LATER = {
    *("model", "model_type", "config_overrides", "tokenizer", "vae", "vae_path", "compile_mode", "report_to"),
    *("text_file", "dataset", "dataset_config", "split", "text_column", "image_folder", "image_column", "data_folder"),
    *("input_key", "output_key", "cache_folder", "data_root", "style_subdirs", "latent_column", "style_column"),
}
TEXTS = {
    "output_dir": "FILE",
    "save_dir": "FILE",
    "resume_from_checkpoint": "missing",
    "plan": "x",
    "skip": "",
    "disk": "missing",
}


def recipe_options(name: str) -> Iterator[tuple[str, Any, str]]:
    """Yield every option's flag, type with ranges, and field."""
    module = importlib.import_module(f"hf_memopt.recipes.{RECIPES[name]}")
    sections = getattr(module, "Options", None) or module.Config
    for section, kind in get_type_hints(sections).items():
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            prefix = f"{section}." if name == "train_lgt" else ""
            yield f"--{prefix}{field.name}", hints[field.name], field.name


def bad_values(hint: Any, field: str, file: Path) -> list[str]:
    ranges = list(ranges_in(hint))
    plain = get_type_of(hint)
    if plain in (int, float):
        assert len(ranges) == 1, "a number needs a range in its type: see recipes/common/flags.py"
        return [*outside(ranges[0]), "many"]
    if get_origin(plain) is Literal or plain is bool:
        return ["perhaps"]
    if field in TEXTS:
        return [TEXTS[field].replace("FILE", str(file))]
    assert field in OPENED_LATER, "an option needs a bad value in TEXTS"
    return []


def get_type_of(hint: Any) -> Any:
    """Return the number or text behind ranges, options and lists."""
    if get_origin(hint) is Literal or not get_args(hint):
        return hint
    return get_type_of(get_args(hint)[0])


def outside(allowed: Range) -> Iterator[str]:
    yield from ("nan", "inf") if not allowed.whole else ("1.5",)
    for bound, step in ((allowed.at_least, -1), (allowed.at_most, 1), (allowed.above, 0), (allowed.below, 0)):
        if math.isfinite(bound):
            yield str(bound + step)


@pytest.mark.parametrize("name", RECIPES)
def test_options_of_recipes(name: str, tmp_path: Path, capsys: Capture) -> None:
    recipe = importlib.import_module(f"hf_memopt.recipes.{name}")
    capsys.readouterr()  # of libraries that print as they are imported
    (tmp_path / "file").write_text("precious")
    for flag, hint, field in recipe_options(name):
        for value in bad_values(hint, field, tmp_path / "file"):
            line = line_of(one_line_errors(name, recipe.main, [flag, value]), capsys)
            assert re.search(rf"\b{field}\b", line), (flag, value, line)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


SEEDS = ("-1", "1.5", "nan", "inf", str(2**31), "many")
DEMOS = {
    "hf_memopt.recipes.reflow.demo": {"--seed": SEEDS, "--output": ("FILE", "FILE/below")},
    "benchmarks.limit.demo": {"--seed": SEEDS, "--output": ("FILE", "FILE/below"), "--steps": NUMBERS},
    "benchmarks.metaworld.demo": {
        "--tasks": ("", "reach-v3,", "reach-v3,reach-v3"),
        "--seed": SEEDS,
        **dict.fromkeys(("--demonstrations", "--teacher-steps", "--student-steps", "--episodes"), NUMBERS),
    },
}


@pytest.mark.parametrize("name", DEMOS)
def test_options_of_demos(name: str, tmp_path: Path, capsys: Capture) -> None:
    demo = importlib.import_module(name)
    capsys.readouterr()
    (tmp_path / "file").write_text("precious")
    for flag, values in DEMOS[name].items():
        for value in values:
            # The output folder is a file, so that a demo that accepts the value does not begin.
            arguments = [f"--output={tmp_path / 'file'}", f"{flag}={value.replace('FILE', str(tmp_path / 'file'))}"]
            line = line_of(one_line_errors(name, demo.main, arguments), capsys)
            assert re.search(rf"\b{flag.strip('-')}\b", line), (arguments, line)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def training_step(max_grad_norm: float) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    hf_memopt.train_step(
        accelerator, model, lambda model, x: model(x).sum(), [torch.ones(1, 1)], optimizer, max_grad_norm=max_grad_norm
    )


def loss_in_chunks(chunk_size: int) -> None:
    training.chunked_loss(lambda x: x, torch.ones(2, requires_grad=True), chunk_size=chunk_size)


PACKAGES = (hf_memopt, activations, checkpoint, memory, planning, training, weights)
# The package of each public name. Names are looked up when they are used: `attach` imports Trainer.
PUBLIC = {name: package for package in PACKAGES for name in package.__all__}
SAVINGS = {"activation_memory_gpu_mb": 1.0, "offload_ratio": 0.5, "link_gb_per_s": 10.0, "compute_ms": 1.0}
# A call with a bad number of each public name that takes numbers.
CALLS: dict[str, Callable[..., object]] = {
    "ActivationOffloader": hf_memopt.ActivationOffloader,
    "Checkpoints": lambda **bad: hf_memopt.Checkpoints(None, "x", **bad),
    "LeakMonitor": memory.LeakMonitor,
    "MemoryLoggingCallback": lambda **bad: hf_memopt.MemoryLoggingCallback(**bad),
    "MemoryLogger": lambda **bad: memory.MemoryLogger(None, **bad),
    "MicroBatcher": lambda **bad: hf_memopt.MicroBatcher(None, **bad),
    "OffloadedOptimizer": lambda **bad: hf_memopt.OffloadedOptimizer(torch.optim.SGD([torch.ones(1)]), **bad),
    "OffloadedTeacher": lambda **bad: hf_memopt.OffloadedTeacher(nn.Linear(1, 1), device="cpu", **bad),
    "StreamedWeights": lambda **bad: hf_memopt.StreamedWeights(nn.Linear(1, 1).requires_grad_(False), **bad),
    "attach": lambda **bad: hf_memopt.attach(None, **bad),
    "append_metrics": lambda **bad: memory.append_metrics(Path("x"), metrics={}, **bad),
    "chunked_loss": loss_in_chunks,
    "detect_leaks": lambda **bad: hf_memopt.detect_leaks(lambda: None, **bad),
    "endless_batches": lambda **bad: next(checkpoint.endless_batches(None, None, **bad)),
    "estimate_offloading_memory_savings": lambda **bad: hf_memopt.estimate_offloading_memory_savings(**SAVINGS | bad),
    "estimate_peak_memory": lambda **bad: hf_memopt.estimate_peak_memory(None, None, **bad),
    "estimate_trainer": lambda **bad: planning.estimate_trainer(None, **bad),
    "find_micro_batch": lambda **bad: training.find_micro_batch(None, None, None, None, **bad),
    "plan": lambda **bad: hf_memopt.plan(None, gpu="8GiB", **bad),
    "split_batch": lambda **bad: next(training.split_batch(torch.ones(2), **bad)),
    "train_step": training_step,
    "verify": lambda **bad: hf_memopt.verify(None, None, **bad),
}
# Results that this library makes of checked values.
RESULTS = {
    *("InfeasibleBudgetError", "LeakReport", "MemoryEstimate", "NonFiniteGradientError", "OffloadStats", "StepResult"),
    *("OptimizerReport", "TeacherReport", "WeightsReport", "SettingsPlan"),
    *("Culprit", "DeviceMemory", "HostMemory", "LargeTensor", "PhasePeak", "Row", "SimulatedStep"),
}


# Names that take a count of 0.
TAKES_ZERO = {"min_bytes_per_step", "num_taken", "prefetch_ahead", "step"}


def numeric_parameters(name: str) -> dict[str, str]:
    public = getattr(PUBLIC[name], name)
    is_plain_error = inspect.isclass(public) and "__init__" not in vars(public)
    parameters = inspect.signature(public).parameters.values() if callable(public) and not is_plain_error else ()
    texts = {each.name: inspect.formatannotation(each.annotation) for each in parameters}
    return {each: text for each, text in texts.items() if re.fullmatch(r"(int|float)( \| None)?", text)}


def test_every_public_name_that_takes_numbers_has_a_case() -> None:
    assert {name for name in PUBLIC if numeric_parameters(name)} == {*CALLS, *RESULTS}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_public_names(name: str) -> None:
    for parameter, annotation in numeric_parameters(name).items():
        of_counts = (1.5, *(() if parameter in TAKES_ZERO else (0,))) if annotation.startswith("int") else ()
        for value in (-1, float("nan"), float("inf"), *of_counts):
            with pytest.raises(ValueError, match=rf"^{parameter}={value} must be "):
                CALLS[name](**{parameter: value})
