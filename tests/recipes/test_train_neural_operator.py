import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import accelerators
import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import launch_command, launch_command_parser
from late_imports import LateModule
from recipe_flags import NEURAL_OPERATOR as TINY
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from hf_memopt import detect_leaks
from hf_memopt.checkpoint import endless_batches
from hf_memopt.command_line import one_line_errors
from hf_memopt.recipes.neural_operator.darcy import Darcy, generate
from hf_memopt.recipes.neural_operator.options import ModelOptions, parse
from hf_memopt.training import NonFiniteGradientError

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), pytest.mark.e2e]

models = LateModule("neuralop.models")
neural_operator_data = LateModule("hf_memopt.recipes.neural_operator.data")
neural_operator_model = LateModule("hf_memopt.recipes.neural_operator.step")
neural_operator_report = LateModule("hf_memopt.recipes.neural_operator.report")
train_neural_operator = LateModule("hf_memopt.recipes.train_neural_operator")


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no figures, which takes longer than the training, except in the fixtures' runs."""
    monkeypatch.setattr("hf_memopt.recipes.neural_operator.report.draw", lambda rows, file: None)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"--cache_folder={tmp_path_factory.mktemp('cache')}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Path:
    """A run without offloading, with a checkpoint inside an epoch, at the seventh update of twelve."""
    folder = tmp_path_factory.mktemp("plain")
    with accelerators.on_the_cpu():
        train_neural_operator.main([*TINY, cache, f"--output_dir={folder}", "--offload=off", "--checkpointing_steps=7"])
    return folder


def train(folder: Path, *flags: str) -> dict[str, Any]:
    return train_neural_operator.main([*flags, f"--output_dir={folder}"])


def weights(folder: Path) -> dict[str, Tensor]:
    # neuralop also saves the model's arguments.
    state = torch.load(folder / "model_state_dict.pt", weights_only=False)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_memory_is_logged_for_the_report(plain: Path) -> None:
    (entry,) = [json.loads(line) for line in (plain / "memory.jsonl").read_text().splitlines()]
    assert entry["step"] == 10  # of twelve updates
    assert entry["memory/host_rss_gib"] > 0


def test_results_say_how_well_each_resolution_is_predicted(plain: Path) -> None:
    results = json.loads((plain / "results.json").read_text())
    first, last = [entry for entry in results["history"] if "l2_16" in entry]
    assert (first["epoch"], last["epoch"]) == (2, 4)
    assert results["history"][-1]["loss"] < results["history"][0]["loss"]
    assert results["final"] == last
    assert {"l2_16", "h1_16", "l2_32", "h1_32"} <= last.keys()
    model = models.FNO.from_checkpoint(plain, "model").eval()
    data = generate(Darcy("train", 16, 24), CPU)["y"]
    test = generate(Darcy("test", 32, 4), CPU)
    with torch.no_grad():
        found = model(test["x"][:, None].float()) * (data.std() + 1e-7) + data.mean()
    error = (found[:, 0] - test["y"]).flatten(1).norm(dim=1) / test["y"].flatten(1).norm(dim=1)
    assert last["l2_32"] == pytest.approx(error.mean().item(), rel=1e-4)


def test_panels_show_every_resolution(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert (plain / "panels.png").read_bytes().startswith(b"\x89PNG")
    assert (plain / "panels.png").stat().st_size > 20_000
    table = neural_operator_report.errors_table(json.loads((plain / "results.json").read_text()))
    assert [line.split()[0] for line in table.splitlines()] == ["resolution", "16", "32"]
    assert table.count("trained") == 1


def test_it_learns(tmp_path: Path, cache: str) -> None:
    flags = ("--num_train=200", "--num_test=20", "--epochs=6", "--hidden_channels=12", "--learning_rate=0.01")
    results = train(tmp_path, *TINY, cache, *flags, "--test_resolutions", "16", "--offload=off")
    assert results["final"]["l2_16"] < 0.2


LEVERS = {
    "all": ("--offload=all",),
    "budget": ("--offload=auto", "--budget_gib=0.0005"),
    "checkpointed": ("--offload=off", "--checkpoint_blocks", "--checkpoint_mlps"),
    "inputs": ("--offload=inputs", "--checkpoint_blocks", "--checkpoint_mlps"),
}


@pytest.mark.parametrize("lever", LEVERS)
def test_no_lever_changes_a_bit_of_the_weights(lever: str, plain: Path, cache: str, tmp_path: Path) -> None:
    results = train(tmp_path, *TINY, cache, "--cpu_copies", *LEVERS[lever])
    assert lever == "checkpointed" or results["training_cost"].moved_mib > 0
    assert equal(weights(tmp_path), weights(plain))


def test_another_seed_gives_other_weights(plain: Path, cache: str, tmp_path: Path) -> None:
    train(tmp_path, *TINY, cache, "--offload=off", "--seed=1")
    assert not equal(weights(tmp_path), weights(plain))


def test_every_epoch_has_every_sample_in_an_order_of_its_own(cache: str, tmp_path: Path) -> None:
    options = parse("", [*TINY, cache, f"--output_dir={tmp_path}", "--offload=off"])
    accelerator = train_neural_operator.make_accelerator(options)
    run = train_neural_operator.prepare(accelerator, options, neural_operator_data.load(options.data, CPU))

    def order(epoch: int) -> list[float]:
        batches = endless_batches(accelerator, run.batches, 3 * epoch)
        return torch.cat([next(batches)["y"].sum(dim=(1, 2, 3)) for _ in range(3)]).tolist()

    first, second = order(0), order(1)
    assert len(set(first)) == 24
    assert first != second
    assert sorted(first) == sorted(second)
    assert order(0) == first


def test_micro_batches_give_the_same_update_up_to_rounding(
    plain: Path, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare one epoch: AdamW amplifies small differences of small gradients."""
    sizes: list[int] = []
    backward = Accelerator.backward
    monkeypatch.setattr(Accelerator, "backward", lambda self, loss: (sizes.append(1), backward(self, loss)))
    flags = (*TINY, cache, "--offload=all", "--cpu_copies", "--epochs=1", "--lr_scheduler_type=constant")
    whole = train(tmp_path / "whole", *flags)
    assert len(sizes) == 3
    parts = train(tmp_path / "parts", *flags, "--micro_batch_size=3")
    assert len(sizes) == 3 + 3 * 3
    assert parts["history"][0]["loss"] == pytest.approx(whole["history"][0]["loss"], rel=1e-5)
    assert parts["final"]["l2_32"] == pytest.approx(whole["final"]["l2_32"], rel=1e-3)


@pytest.mark.parametrize("model", ["fno", "tfno", "uno"])
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(
    model: str, plain: Path, cache: str, tmp_path: Path
) -> None:
    flags = (*TINY, cache, f"--model={model}")
    whole = plain
    if model != "fno":
        whole = tmp_path / "whole"
        train(whole, *flags, "--offload=off", "--checkpointing_steps=7")
    shutil.copytree(whole / "checkpoints", tmp_path / "resumed" / "checkpoints")
    again = ("--offload=all", "--cpu_copies", "--resume_from_checkpoint=latest")
    resumed = train(tmp_path / "resumed", *flags, *again)
    assert equal(weights(tmp_path / "resumed"), weights(whole))
    assert resumed["history"] == json.loads((whole / "results.json").read_text())["history"]


def test_a_run_that_is_told_to_stop_saves_and_goes_on_later(
    plain: Path, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = Accelerator.backward

    def told_to_stop(accelerator: Accelerator, loss: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        backward(accelerator, loss)

    monkeypatch.setattr(Accelerator, "backward", told_to_stop)
    with pytest.raises(SystemExit, match="130"):
        train(tmp_path, *TINY, cache, "--offload=off")
    monkeypatch.undo()
    monkeypatch.setattr("hf_memopt.recipes.neural_operator.report.draw", lambda rows, file: None)
    accelerators.forget_accelerator()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-000001"]
    train(tmp_path, *TINY, cache, "--offload=off", "--resume_from_checkpoint=latest")
    assert equal(weights(tmp_path), weights(plain))


def test_a_saved_tfno_can_be_loaded(cache: str, tmp_path: Path) -> None:
    train(tmp_path, *TINY, cache, "--model=tfno", "--epochs=1", "--offload=off")
    assert equal(dict(models.TFNO.from_checkpoint(tmp_path, "model").named_parameters()), weights(tmp_path))


def test_a_saved_uno_can_be_loaded(cache: str, tmp_path: Path) -> None:
    train(tmp_path, *TINY, cache, "--model=uno", "--epochs=1", "--offload=off")
    options = ModelOptions(**json.loads((tmp_path / "results.json").read_text())["model"])
    model = neural_operator_model.make_model(options)
    model.load_state_dict(torch.load(tmp_path / "model_state_dict.pt"))
    assert equal(dict(model.named_parameters()), weights(tmp_path))


def test_neuralops_trainer_gives_the_same_weights_with_and_without_offloading(cache: str, tmp_path: Path) -> None:
    flags = (*TINY, cache, "--loop=neuralop")
    plain = train(tmp_path / "off", *flags, "--offload=off")
    offloaded = train(tmp_path / "all", *flags, "--offload=all", "--cpu_copies")
    assert offloaded["training_cost"].moved_mib > 0
    assert equal(weights(tmp_path / "all"), weights(tmp_path / "off"))
    assert plain["final"] == offloaded["final"]
    assert {"epoch", "loss", "l2_16", "h1_32"} <= plain["final"].keys()


@pytest.mark.parametrize("loop", ["accelerate", "neuralop"])
def test_training_that_diverges_stops_and_leaves_what_was_good(
    loop: str, cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY, cache, f"--output_dir={tmp_path}", f"--loop={loop}", "--learning_rate=1e15", "--offload=off"]
    assert one_line_errors("train", train_neural_operator.main, flags) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train: error: ")]
    assert "Non-finite loss at step 2. That update was not made. rank 0, micro-batch 1: loss, " in line
    assert not (tmp_path / "model_state_dict.pt").exists()
    if loop == "accelerate":
        state = torch.load(tmp_path / "checkpoints" / "step-000001" / "pytorch_model.bin", weights_only=True)
        assert all(value.isfinite().all() for value in state.values())


def test_one_sample_that_is_not_a_number_stops_the_run(cache: str, tmp_path: Path) -> None:
    generated = next(Path(cache.partition("=")[2]).glob("*/darcy_train_16.pt")).parent
    shutil.copytree(generated, tmp_path / "own")
    samples = torch.load(generated / "darcy_train_16.pt")
    samples["x"] = samples["x"].float()
    samples["x"][3, 0, 0] = float("nan")
    torch.save(samples, tmp_path / "own" / "darcy_train_16.pt")
    flags = (*TINY, f"--data_folder={tmp_path / 'own'}", "--test_resolutions", "16", "--offload=off")
    with pytest.raises(NonFiniteGradientError, match=r"Non-finite loss at step [1-3]\. "):
        train(tmp_path / "run", *flags)


def test_the_users_own_files_are_used(plain: Path, cache: str, tmp_path: Path) -> None:
    generated = next(Path(cache.partition("=")[2]).glob("*/darcy_train_16.pt")).parent
    samples = torch.load(generated / "darcy_train_16.pt")
    (tmp_path / "own").mkdir()
    torch.save({name: value.flip(1) for name, value in samples.items()}, tmp_path / "own" / "darcy_train_16.pt")
    shutil.copy(generated / "darcy_test_16.pt", tmp_path / "own")
    flags = (*TINY, f"--data_folder={tmp_path / 'own'}", "--epochs=1", "--offload=off")
    results = train(tmp_path / "run", *flags, "--test_resolutions", "16")
    assert results["data"]["source"] == f"files in {tmp_path / 'own'}"
    with pytest.raises(ValueError, match=r"data_folder='.*own' lacks darcy_test_32.pt; choose"):
        train(tmp_path / "other", *flags)
    with pytest.raises(ValueError, match=r"num_train=99: a file in data_folder='.*own' has 24 samples"):
        train(tmp_path / "other", *flags, "--test_resolutions", "16", "--num_train=99")


SHAPES = {
    "channels": ((3, 16, 16), (2, 16, 16), ()),
    "volume": ((12, 12, 12), (12, 12, 12), ("--num_dims=3",)),
    "rectangle": ((16, 24), (16, 24), ()),
    "line": ((64,), (64,), ()),
}


@pytest.mark.parametrize("loop", ["accelerate", "neuralop"])
@pytest.mark.parametrize("kind", ["fno", "uno"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.sweep(share=0.25)
def test_fields_of_any_shape_train_bitwise_as_without_offloading(
    shape: str, kind: str, loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, more = SHAPES[shape]
    torch.manual_seed(0)
    (tmp_path / "own").mkdir()
    for split in ("train", "test"):
        torch.save({"x": torch.randn(8, *x), "y": torch.randn(8, *y)}, tmp_path / "own" / f"darcy_{split}_16.pt")
    sizes = ("--num_train=8", "--num_test=2", "--epochs=2", "--batch_size=4", "--hidden_channels=4", "--modes=4")
    flags = (*TINY, f"--data_folder={tmp_path / 'own'}", *sizes, *more, "--test_resolutions", "16", f"--loop={loop}")
    model = ("--model=uno", "--num_layers=4") if kind == "uno" else ()
    monkeypatch.undo()  # the figures too
    plain = train(tmp_path / "plain", *flags, *model, "--offload=off")
    all_moved = ("--offload=all", "--cpu_copies", "--offload_threshold_mb=0")
    moved = train(tmp_path / "moved", *flags, *model, *all_moved)
    assert moved["training_cost"].moved_mib > 0
    assert equal(weights(tmp_path / "moved"), weights(tmp_path / "plain"))
    assert plain["final"]["h1_16"] < 3, "a mean over channels"
    assert (tmp_path / "plain" / "panels.png").is_file()


def test_float16_with_a_loss_scaler_trains_complex_weights(
    plain: Path, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate has no scaler on a CPU, where float16 is float32: put back, it changes no bit."""
    made = Accelerator.__init__

    def with_scaler(self: Accelerator, *arguments: Any, **settings: Any) -> None:
        made(self, *arguments, **settings)
        self.scaler = GradScaler("cpu", init_scale=2.0**8)

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
    train(tmp_path, *TINY, cache, "--offload=off")
    assert equal(weights(tmp_path), weights(plain))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=uno", "--num_layers=3"], "num_layers=3 must be at least 4 for model='uno'"),
        (["--modes=20"], "modes=20: a grid of 16 nodes has no such frequencies"),
        (["--solve_resolution=0", "--resolution=2", "--modes=2"], "resolution=2 must be at least 3"),
        (["--budget_gib=1", "--offload=all"], "budget_gib=1.0 needs --offload auto"),
        (["--offload=inputs"], "add --checkpoint_blocks or --checkpoint_mlps"),
        (["--loop=neuralop", "--checkpointing_steps=1"], "checkpointing_steps=1 is not for loop='neuralop'; use"),
        (["--loop=neuralop", "--micro_batch_size=2"], "micro_batch_size=2 is not for loop='neuralop'"),
        (["--loop=neuralop", "--auto_micro_batch"], "auto_micro_batch=True is not for loop='neuralop'; use"),
        (["--loop=neuralop", "--plan=auto"], "plan='auto' is not for loop='neuralop'; use --loop accelerate"),
        (["--resume_from_checkpoint=latest"], r"resume_from_checkpoint='latest': .* there is no valid checkpoint"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(flags: list[str], message: str, cache: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path, *TINY, cache, *flags)


def test_trainer_refuses_mixed_precision(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match="cannot take mixed_precision='bf16'"):
        train(tmp_path, *TINY, cache, "--loop=neuralop")


def test_a_folder_in_use_is_refused(plain: Path, cache: str) -> None:
    with pytest.raises(ValueError, match=r"already holds results.json; go on with --resume_from_checkpoint latest"):
        train(plain, *TINY, cache)


def test_the_demos_flags_are_known() -> None:
    demo = Path(__file__).parents[2] / "recipes" / "configs" / "neural_operator_demo.yaml"
    assert parse("", ["--config_path", str(demo)]).offload.budget_gib == 0.02


@pytest.mark.slow
def test_accelerate_launch_with_bfloat16(cache: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch = ["--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=bf16", "--dynamo_backend=no"]
    script = ["-m", "hf_memopt.recipes.train_neural_operator", *TINY, cache, f"--output_dir={tmp_path}"]
    more = ["--epochs=1", "--offload=all", "--cpu_copies", "--report_to=tensorboard"]
    # The same as the command, without a second interpreter for the launcher.
    launch_command(launch_command_parser().parse_args([*launch, *script, *more]))
    printed = capfd.readouterr().err
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["mixed_precision"] == "bf16"
    assert results["training_cost"]["moved_mib"] > 0
    assert "Training: 100%" in printed
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "auto"])
def test_training_leaks_nothing(mode: str, cache: str, tmp_path: Path) -> None:
    options = parse("", [*TINY, cache, "--cpu_copies", f"--offload={mode}", f"--output_dir={tmp_path}"])
    accelerator = train_neural_operator.make_accelerator(options)
    run = train_neural_operator.prepare(accelerator, options, neural_operator_data.load(options.data, CPU))
    batches = endless_batches(accelerator, run.batches)
    leaks = detect_leaks(lambda: train_neural_operator.update(run, next(batches)), num_steps=36)
    assert not leaks.leaking, str(leaks)
