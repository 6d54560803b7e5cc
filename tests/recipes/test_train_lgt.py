import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import accelerators
import pytest
import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from lgt_toys import tiny
from recipe_flags import LGT as FLAGS
from safetensors.torch import load_file
from torch import Tensor

from hf_memopt import detect_leaks
from hf_memopt.memory.logger import METRICS_FILE
from hf_memopt.recipes import train_lgt
from hf_memopt.recipes.landscapes.prepare import main as prepare_landscapes
from hf_memopt.recipes.lgt import data as lgt_data
from hf_memopt.recipes.lgt import report as lgt_report
from hf_memopt.recipes.lgt.model import compile_module
from hf_memopt.recipes.lgt.report import Check
from hf_memopt.recipes.lgt.step import Run, build_model
from hf_memopt.recipes.train_lgt import main, make_accelerator, prepare, update
from hf_memopt.training import NonFiniteGradientError

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), pytest.mark.e2e]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lgt_report, "draw_panels", lambda *arguments: None)
    monkeypatch.setattr(lgt_report, "draw_curves", lambda *arguments: None)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without any lever, with figures."""
    folder = tmp_path_factory.mktemp("plain")
    with accelerators.on_the_cpu():
        train(folder)
    return folder


def train(folder: Path, *flags: str) -> dict[str, Any]:
    return main([*FLAGS, f"--checkpoint.save_dir={folder}", *flags])


def equal(first: Path, second: Path) -> bool:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (first, second))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_leaves_its_model_figures_and_memory(plain: Path) -> None:
    results = json.loads((plain / "results.json").read_text())
    assert [entry["epoch"] for entry in results["history"]] == [1, 2]
    assert {"loss", "style_swd", "content_ssm", "grad_norm", "seconds", "learning_rate"} <= results["final"].keys()
    assert {"swd", "swd_untranslated", "swd_floor", "ssm", "ssm_others"} <= results["final"].keys()
    assert "swd" not in results["history"][0]
    assert results["history"][0]["learning_rate"] == 0.003
    steps = [json.loads(line)["step"] for line in (plain / METRICS_FILE).read_text().splitlines()]
    assert steps == list(range(1, 11))
    config = train_lgt.parse("", [f"--config_path={plain / 'config.json'}"])
    build_model(config).load_state_dict(load_file(plain / "model.safetensors"))


def test_the_closing_report_has_a_verdict_and_a_figure_in_each_line(plain: Path) -> None:
    checks = [Check(**check) for check in json.loads((plain / "results.json").read_text())["checklist"]]
    assert {check.verdict for check in checks} <= {"passed", "failed", "not applicable"}
    assert all(any(letter.isdigit() for letter in check.measured) for check in checks[:-1])
    assert len(checks) == 8


def test_few_latents_end_in_a_model_and_a_check_that_does_not_apply(tmp_path: Path) -> None:
    for style in ("style0", "style1"):
        (tmp_path / "latents" / style).mkdir(parents=True)
        torch.save(torch.randn(8, 4, 16, 16), tmp_path / "latents" / style / "all.pt")
    results = train(tmp_path / "run", f"--data.data_root={tmp_path / 'latents'}", "--training.batch_size=2")
    (check,) = (check for check in results["checklist"] if check.name == "held-out content (SSM) is kept")
    assert check.verdict == "not applicable"
    assert check.measured == "ssm_others is 0; needs two different held-out latents of each style"
    assert (tmp_path / "run" / "results.json").is_file()


def test_a_report_that_fails_leaves_the_model_and_one_warning(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lgt_report, "checklist", lambda *arguments, **more: 1 / 0)
    assert train(tmp_path) == {}
    assert equal(tmp_path, plain)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"The report is not complete (ZeroDivisionError: division by zero); the model is in {tmp_path}" in warnings


def test_training_that_diverges_stops_and_leaves_what_was_good(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteGradientError, match=r"Non-finite gradient at step 2\."):
        train(tmp_path, "--training.learning_rate=1e25")
    assert not (tmp_path / "model.safetensors").exists()
    saved = load_file(tmp_path / "checkpoints" / "step-000001" / "model.safetensors")
    assert all(value.isfinite().all() for value in saved.values())


LEVERS = {
    "checkpointed": ("--training.use_gradient_checkpointing",),
    "all": ("--offload.offload=all",),
    "budget": ("--offload.offload=auto", "--offload.budget_gib=0.0008"),
}


@pytest.mark.usefixtures("quick_plans")
@pytest.mark.parametrize("lever", LEVERS)
def test_no_lever_changes_a_bit_of_the_weights(lever: str, plain: Path, tmp_path: Path) -> None:
    results = train(tmp_path, *LEVERS[lever])
    assert lever == "checkpointed" or results["training_cost"].moved_mib > 0
    assert equal(tmp_path, plain)


def test_gradient_cache_trains_on_whole_windows(plain: Path, tmp_path: Path) -> None:
    results = train(tmp_path / "all", "--training.gradient_cache", "--training.use_gradient_checkpointing")
    assert len(results["history"]) == 2
    assert not equal(tmp_path / "all", plain)
    assert results["checklist"][6].measured.endswith("of the 512 patches of 8 latents")


def prepared(folder: Path, **values: Any) -> Run:
    fields = {"training__batch_size": 4, "checkpoint__save_dir": str(folder), "training__log_every": 100, **values}
    config = tiny(**fields)
    run = prepare(make_accelerator(config), config, lgt_data.load(config)[0])
    run.model.train()
    return run


def gradients_of_update(run: Run, rows: list[Tensor]) -> Tensor:
    found = []
    run.optimizer.optimizer.register_step_pre_hook(
        lambda *event: found.append(torch.cat([p.grad.flatten() for p in run.model.parameters()]))
    )
    torch.manual_seed(5)
    update(run, rows)
    return found[0]


def test_gradient_cache_takes_the_gradient_of_the_window_as_one_batch(tmp_path: Path) -> None:
    values = {"training__max_grad_norm": 1e9, "model__style_noise": 0.0}
    rows = torch.arange(8)
    cached = gradients_of_update(prepared(tmp_path, training__gradient_cache=True, **values), list(rows.split(4)))
    accelerators.forget_accelerator()
    whole = prepared(tmp_path, training__gradient_cache=True, **{**values, "training__batch_size": 8})
    one_batch = gradients_of_update(whole, [rows])
    assert (cached - one_batch).norm() <= 1e-4 * one_batch.norm()  # see test_lgt_step.py
    accelerators.forget_accelerator()
    naive = gradients_of_update(prepared(tmp_path, **values), list(rows.split(4)))
    assert (naive - one_batch).norm() > 0.1 * one_batch.norm()


@pytest.mark.parametrize("at", [1, 5, 8])
def test_a_run_that_was_told_to_stop_goes_on_to_the_same_weights(
    at: int, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, num_updates = train_lgt.update, 0

    def interrupted(run: Run, window: list[Tensor]) -> dict[str, float]:
        nonlocal num_updates
        num_updates += 1
        if num_updates == at:
            signal.raise_signal(signal.SIGTERM)
        return original(run, window)

    with monkeypatch.context() as patch:
        patch.setattr(train_lgt, "update", interrupted)
        with pytest.raises(SystemExit) as stopped:
            train(tmp_path)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert num_updates == at
    accelerators.forget_accelerator()
    results = train(tmp_path, "--checkpoint.resume_from_checkpoint=latest")
    assert equal(tmp_path, plain)
    wanted = json.loads((plain / "results.json").read_text())["history"]
    for ours, theirs in zip(results["history"], wanted, strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


def test_saved_epochs_are_resumed_with_the_averaged_weights(tmp_path: Path) -> None:
    flags = ("--training.ema_decay=0.9", "--training.save_interval=1")
    train(tmp_path / "whole", *flags)
    train(tmp_path / "parts", *flags)
    (tmp_path / "parts" / "results.json").unlink()
    accelerators.forget_accelerator()
    resumed = ("--checkpoint.resume_from_checkpoint=step-000005",)
    results = train(tmp_path / "parts", *flags, *resumed)
    assert len(results["history"]) == 2
    assert equal(tmp_path / "parts", tmp_path / "whole")


def test_the_average_is_what_is_saved(plain: Path, tmp_path: Path) -> None:
    train(tmp_path, "--training.ema_decay=0.9")
    assert not equal(tmp_path, plain)


def test_a_folder_in_use_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"already holds results.json; go on with --checkpoint.resume_from"):
        train(plain)
    with pytest.raises(
        ValueError, match=r"resume_from_checkpoint='latest': checkpoint 'latest': .* has no file of that name"
    ):
        train(tmp_path, "--checkpoint.resume_from_checkpoint=latest")


def test_the_earliest_time_rises_over_the_first_epochs() -> None:
    config = tiny(training__epsilon=0.4, training__epsilon_warmup_epochs=4)
    assert [train_lgt.earliest_time(config, epoch) for epoch in range(6)] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert train_lgt.earliest_time(tiny(training__epsilon=0.4, training__epsilon_warmup_epochs=0), 0) == 0.4


def test_too_few_latents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training.batch_size=64: a batch of all processes needs 64 latents"):
        train(tmp_path, "--training.batch_size=64")


@pytest.mark.slow
# Dynamo reads the gradients of its inputs, which are no leaves except in the first step.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compilation_is_timed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with a backend that needs no compiler."""
    monkeypatch.setattr(train_lgt, "compile_module", partial(compile_module, backend="eager"))
    results = train(tmp_path, "--training.use_compile", "--training.num_epochs=1", "--training.recompile_limit=16")
    (check,) = (check for check in results["checklist"] if "compiled" in check.name)
    assert check.verdict == "passed"
    assert results["final"]["compile_seconds"] > 0
    assert torch._dynamo.config.recompile_limit == 16
    config = train_lgt.parse("", [f"--config_path={tmp_path / 'config.json'}"])
    build_model(config).load_state_dict(load_file(tmp_path / "model.safetensors"))


@pytest.mark.slow
def test_the_command_line_of_the_launcher(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Launch by path, in bfloat16."""
    launch = ["--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    flags = [*FLAGS, "--training.use_amp", "--training.num_epochs=1", "--offload.offload=all"]
    script = [train_lgt.__file__, *flags, f"--checkpoint.save_dir={tmp_path}"]
    # The same as the command, without a second interpreter for the launcher.
    launch_command(launch_command_parser().parse_args([*launch, *script]))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["mixed_precision"] == "bf16"
    assert results["training_cost"]["moved_mib"] > 0
    assert "passed" in capfd.readouterr().err
    for name in ("panels.png", "curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("gradient_cache", [False, True])
def test_training_leaks_nothing(gradient_cache: bool, tmp_path: Path) -> None:
    run = prepared(tmp_path, training__gradient_cache=gradient_cache, training__ema_decay=0.9)
    rows = list(torch.arange(8).split(4))
    leaks = detect_leaks(lambda: update(run, rows), num_steps=36)
    assert not leaks.leaking, str(leaks)


@pytest.mark.slow
def test_style_is_transferred(tmp_path: Path) -> None:
    """Check that held-out landscapes get the other style, and stay nearer to themselves than to others."""
    demo = Path(train_lgt.__file__).parent / "configs" / "lgt_demo.json"
    prepare_landscapes([f"--output_dir={tmp_path / 'landscapes'}"])
    places = ("--data.data_root", "--inference.vae_path")
    flags = [f"{name}={tmp_path / 'landscapes'}" for name in places]
    results = main([f"--config_path={demo}", f"--checkpoint.save_dir={tmp_path / 'run'}", *flags])
    final = results["final"]
    assert final["swd"] < 0.2 * final["swd_untranslated"]
    assert final["ssm"] < 0.5 * final["ssm_others"]
    assert [check.verdict for check in results["checklist"][1:5]] == ["passed"] * 4
