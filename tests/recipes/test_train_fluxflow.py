import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import accelerators
import pytest
import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from alone import hide_what_is_alive
from late_imports import LateModule
from PIL import Image
from recipe_flags import FLUXFLOW as TINY
from torch import Tensor, nn

from hf_memopt import detect_leaks
from hf_memopt.recipes.fluxflow.options import parse
from hf_memopt.training import NonFiniteGradientError

pytestmark = [pytest.mark.usefixtures("on_the_cpu"), pytest.mark.e2e]

diffusers = LateModule("diffusers")
train_fluxflow = LateModule("hf_memopt.recipes.train_fluxflow")


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memopt.recipes.fluxflow.report.draw", lambda history, file: None)


def train(folder: Path, *flags: str) -> dict[str, Any]:
    accelerators.forget_accelerator()
    return train_fluxflow.main([*TINY, f"--output_dir={folder}", *flags])


def prepared(folder: Path, *flags: str) -> Any:
    accelerators.forget_accelerator()
    options = parse("", [*TINY, f"--output_dir={folder}", *flags])
    return train_fluxflow.prepare(train_fluxflow.make_accelerator(options), options)


def weights(folder: Path, name: str = "vae") -> dict[str, Tensor]:
    return diffusers.AutoencoderKL.from_pretrained(folder / name).state_dict()


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without an interruption, in two epochs of three batches."""
    folder = tmp_path_factory.mktemp("whole")
    with accelerators.on_the_cpu():
        train(folder, "--max_steps=6", "--resolutions", "16", "8")
    return folder


# ------------------------------------------------------------------------------------------------------ counting


@pytest.mark.parametrize("training_steps", [1, 2, 3])
@pytest.mark.parametrize("resolutions", [(16,), (16, 8), (16, 12, 8)])
def test_steps_warm_up_and_r1_are_counted(
    training_steps: int, resolutions: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check one global step per batch, with any number of updates, and R1 at every fourth update."""
    calls: list[tuple[bool, float, int]] = []

    def step(run: Any, images: Tensor, weights: Any, *, with_r1: bool) -> dict[str, Tensor]:
        calls.append((with_r1, weights.kl, images.shape[-1]))
        return {"l1": torch.zeros(())}

    monkeypatch.setattr("hf_memopt.recipes.train_fluxflow.step", step)
    flags = ("--r1_interval=4", "--kl_warmup_steps=10", "--kl_weight=1", f"--training_steps={training_steps}")
    run = prepared(tmp_path, *flags, "--resolutions", *map(str, resolutions))
    run.optimizer.vae.step()  # schedulers expect a step of their optimizer first
    run.optimizer.discriminator.step()
    rates = []
    for _, images in zip(range(5), run.batches, strict=False):
        train_fluxflow.train_batch(run, images)
        rates.append(run.scheduler[0].last_epoch)
    per_batch = training_steps * len(resolutions)
    assert run.progress.num_updates == 5
    assert rates == [1, 2, 3, 4, 5]
    assert run.progress.num_discriminator_updates == len(calls) == 5 * per_batch
    assert [number for number, (with_r1, *_) in enumerate(calls) if with_r1] == list(range(0, len(calls), 4))
    assert [size for *_, size in calls] == [*resolutions] * (5 * training_steps)
    expected = Counter({train_fluxflow.weights_at(number, run.options.losses).kl: per_batch for number in range(5)})
    assert Counter(kl for _, kl, _ in calls) == expected


def test_the_average_takes_every_update_in(tmp_path: Path) -> None:
    run = prepared(tmp_path, "--training_steps=3", "--resolutions", "16", "8")
    train_fluxflow.train_batch(run, next(iter(run.batches)))
    assert run.average is not None
    assert run.average.state_dict()["optimization_step"] == 6


# ------------------------------------------------------------------------------------------------------- results


def test_it_leaves_what_it_says(whole: Path) -> None:
    results = json.loads((whole / "results.json").read_text())
    assert [entry["step"] for entry in results["history"]] == [1, 2, 3, 4, 5, 6]
    assert {"l1", "mse", "kl", "discriminator", "adversarial", "grad_norm"} <= results["history"][0].keys()
    assert (whole / "panels.png").read_bytes().startswith(b"\x89PNG")
    assert results["perceptual"] is None
    assert not equal(weights(whole), weights(whole, "vae_ema"))
    assert "memory/generator_" in (whole / "memory.jsonl").read_text()


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    flags = ("--channels", "16", "16", "--num_drawn=16", "--learning_rate=0.005", "--mse_weight=1")
    calm = ("--adversarial_weight=0.01", "--adversarial_warmup_steps=80", "--kl_weight=1e-5", "--log_every=5")
    results = train(tmp_path, *flags, *calm, "--max_steps=80")
    first, last = ([entry["mse"] for entry in results["history"]][part] for part in (slice(4), slice(-4, None)))
    assert sum(last) < 0.6 * sum(first)


def test_random_perceptual_weights_are_named_wherever_they_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stub(nn.Module):
        name, description = "lpips_load_only", "LOAD ONLY: a stub"

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - target).abs().mean((1, 2, 3))

    monkeypatch.setattr("hf_memopt.recipes.fluxflow.model.make_perceptual", lambda losses, seed: Stub())
    results = train(tmp_path, "--lpips_weight=0.1", "--max_steps=1")
    assert "lpips_load_only" in results["history"][0]
    assert "lpips" not in results["history"][0]
    assert "LOAD ONLY" in json.loads((tmp_path / "results.json").read_text())["perceptual"]
    assert any("LOAD ONLY" in record.message and record.levelname == "WARNING" for record in caplog.records)


# -------------------------------------------------------------------------------------------- stopping, going on


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(whole: Path, tmp_path: Path) -> None:
    """Stop by a signal in the second epoch, and resume."""
    flags = ("--max_steps=6", "--resolutions", "16", "8", "--lr_scheduler_type=cosine")
    with pytest.MonkeyPatch.context() as patch:
        record = train_fluxflow.record

        def interrupt(run: Any, figures: dict[str, Tensor]) -> None:
            record(run, figures)
            if run.progress.num_updates == 4:
                os.kill(os.getpid(), signal.SIGTERM)

        patch.setattr("hf_memopt.recipes.train_fluxflow.record", interrupt)
        with pytest.raises(SystemExit) as left:
            train(tmp_path, *flags)
    assert left.value.code == 128 + signal.SIGTERM
    resumed = train(tmp_path, *flags, "--resume_from_checkpoint=latest")
    for name in ("vae", "vae_ema"):
        assert equal(weights(tmp_path, name), weights(whole, name))
    assert resumed["history"] == json.loads((whole / "results.json").read_text())["history"]


@pytest.mark.parametrize("failure", ["in the step", "not finite"])
def test_an_error_stops_the_run_and_what_was_trained_is_saved(
    failure: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, flags = train_fluxflow.step, ("--max_steps=6", "--resolutions", "16", "8")

    def failing(run: Any, images: Tensor, *rest: Any, **options: Any) -> dict[str, Tensor]:
        failing.calls += 1
        if failing.calls == 7 and failure == "in the step":
            raise torch.OutOfMemoryError("out of memory")
        return step(run, images * float("nan") if failing.calls == 7 else images, *rest, **options)

    failing.calls = 0
    with monkeypatch.context() as patch:
        patch.setattr("hf_memopt.recipes.train_fluxflow.step", failing)
        kind, message = torch.OutOfMemoryError, "out of memory"
        if failure == "not finite":
            kind = NonFiniteGradientError
            message = r"Non-finite loss at step 4\. .*\n  rank 0, micro-batch 1: loss, "
        with pytest.raises(kind, match=message):
            train(tmp_path, *flags)
    assert not (tmp_path / "results.json").exists()
    assert (tmp_path / "checkpoints" / "latest").read_text().startswith("step-000003\n")
    resumed = train(tmp_path, *flags, "--resume_from_checkpoint=latest")
    expected = json.loads((whole / "results.json").read_text())["history"]
    assert [entry["step"] for entry in resumed["history"]] == [1, 2, 3, 4, 5, 6]
    assert resumed["history"][:3] == expected[:3]
    assert all(torch.isfinite(value).all() for value in weights(tmp_path).values())


def test_a_finished_run_has_nothing_to_resume(tmp_path: Path) -> None:
    train(tmp_path, "--max_steps=1", "--checkpointing_steps=1")
    with pytest.raises(ValueError, match="max_steps=1: latest has 1; use more"):
        train(tmp_path, "--max_steps=1", "--resume_from_checkpoint=latest")


def test_a_folder_in_use_is_refused(whole: Path) -> None:
    with pytest.raises(ValueError, match=r"already holds results.json; go on with --resume_from_checkpoint latest"):
        train(whole)


# --------------------------------------------------------------------------------------------------------- leaks


def steps_of(run: Any) -> Any:
    """Return a function that makes one global step."""
    batches = iter(run.batches)
    return lambda: train_fluxflow.train_batch(run, next(batches))


@pytest.fixture
def little_alive(small_heap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_what_is_alive(monkeypatch)


@pytest.mark.usefixtures("little_alive")
@pytest.mark.parametrize("num_steps", [24, pytest.param(60, marks=pytest.mark.slow)])
def test_steps_leak_nothing(num_steps: int, tmp_path: Path) -> None:
    """Have R1 in all steps, since a leak at every 16th update would not look regular."""
    run = prepared(tmp_path, "--num_drawn=16", "--r1_interval=1")
    found = detect_leaks(steps_of(run), num_steps=num_steps)
    assert not found.leaking, str(found)
    assert found.bytes_per_step == 0


@pytest.mark.usefixtures("little_alive")
def test_a_planted_leak_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the penalty, whose graph a backward with `retain_graph` leaves alive."""
    kept: list[Tensor] = []
    penalty, backward = train_fluxflow.step.__globals__["r1_penalty"], torch.autograd.backward

    def keep(scores: Tensor, images: Tensor) -> Tensor:
        kept.append(penalty(scores, images))
        return kept[-1]

    monkeypatch.setitem(train_fluxflow.step.__globals__, "r1_penalty", keep)
    monkeypatch.setattr(torch.autograd, "backward", lambda *given, **how: backward(*given, retain_graph=True, **how))
    run = prepared(tmp_path, "--r1_interval=1", "--num_drawn=16")
    found = detect_leaks(steps_of(run), num_steps=24)
    assert found.leaking
    assert "kept" in str(found)


@pytest.mark.slow
@pytest.mark.usefixtures("little_alive")
@pytest.mark.parametrize("mode", ["off", "auto"])
def test_three_hundred_steps_leak_nothing(mode: str, tmp_path: Path) -> None:
    flags = ("--cpu_copies", f"--offload={mode}", "--offload_threshold_mb=0.001", "--resolutions", "16", "8")
    run = prepared(tmp_path, "--num_drawn=16", *flags)
    found = detect_leaks(steps_of(run), num_steps=300)
    assert run.progress.num_discriminator_updates == 600
    assert not found.leaking, str(found)
    assert found.bytes_per_step == 0


def test_leak_detection_is_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Monitor:
        def __init__(self, action: str) -> None:
            made.append(action)

        def step(self) -> None:
            made.append("step")

    monkeypatch.setattr("hf_memopt.recipes.train_fluxflow.LeakMonitor", Monitor)
    train(tmp_path, "--max_steps=2", "--detect_leaks=raise")
    assert made == ["raise", "step", "step"]


# -------------------------------------------------------------------------------------------------------- levers


def test_an_average_in_host_memory_is_the_same(whole: Path, tmp_path: Path) -> None:
    train(tmp_path, "--max_steps=6", "--resolutions", "16", "8", "--ema_on_cpu")
    assert equal(weights(tmp_path, "vae_ema"), weights(whole, "vae_ema"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--checkpoint_discriminator"], "checkpoint_discriminator=True with spectral_norm=True: each forward pass"),
        (["--offload=inputs"], "offload='inputs' moves the inputs of checkpointed blocks; add --checkpoint_vae"),
        (["--prefetch_factor=4"], "prefetch_factor=4 needs --num_workers"),
        (["--streaming"], "streaming=True needs --dataset or --image_folder"),
        (["--image_folder=a", "--dataset=b"], "give one of them"),
        (["--dataset=pandas"], "dataset='pandas' cannot be loaded: a loader of the datasets library"),
        (["--image_folder=pandas"], "image_folder='pandas' cannot be loaded: a loader of the datasets library"),
        (["--resolutions", "32"], "resolutions: 32 must lie between 1"),
        (["--resolutions", "8", "--lpips_weight=1"], "resolutions: 8 must lie between 16, the smallest image"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path, *flags)


@pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument:UserWarning")  # raised by diffusers
def test_a_vae_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vae='nowhere' cannot be loaded; pass a hub id or folder"):
        prepared(tmp_path, "--vae=nowhere")


def test_float16_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="mixed_precision='fp16' is not for this recipe; use bf16 or no"):
        train(tmp_path)


def test_a_trained_vae_is_gone_on_with(whole: Path, tmp_path: Path) -> None:
    run = prepared(tmp_path, f"--vae={whole / 'vae_ema'}")
    assert equal(run.model.vae.state_dict(), weights(whole, "vae_ema"))


def test_a_report_that_fails_leaves_the_model_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hf_memopt.recipes.fluxflow.report.psnr", lambda *images: 1 / 0)
    train(tmp_path, "--max_steps=1")
    assert weights(tmp_path)
    assert (
        f"The report is not complete (ZeroDivisionError: division by zero); the model is in {tmp_path}" in caplog.text
    )


def test_the_vae_of_a_whole_pipeline_is_gone_on_with(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "vae", tmp_path / "pipeline" / "vae")
    (tmp_path / "pipeline" / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    run = prepared(tmp_path / "run", f"--vae={tmp_path / 'pipeline'}")
    assert equal(run.model.vae.state_dict(), weights(whole))


def write_vae(folder: Path, **channels: int) -> None:
    depth = {"block_out_channels": (8, 8), "norm_num_groups": 4}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    diffusers.AutoencoderKL(**channels, **depth, **blocks).save_pretrained(folder)


def test_gray_images_train_a_vae_of_one_channel(tmp_path: Path) -> None:
    write_vae(tmp_path / "gray", in_channels=1, out_channels=1)
    results = train(
        tmp_path / "run", f"--vae={tmp_path / 'gray'}", "--max_steps=2", "--lpips_weight=0.1", "--resolution=16"
    )
    assert results["psnr_db"] > 0
    trained = weights(tmp_path / "run")
    assert trained["encoder.conv_in.weight"].shape[1] == trained["decoder.conv_out.weight"].shape[0] == 1
    with Image.open(tmp_path / "run" / "panels.png") as panels:
        assert panels.size[0] > panels.size[1] > 0


def test_a_vae_of_other_channels_is_refused(tmp_path: Path) -> None:
    write_vae(tmp_path / "depth", in_channels=4, out_channels=4)
    with pytest.raises(ValueError, match=r"vae='.*depth' goes from 4 to 4 channels; images have 3, or 1 if they are"):
        prepared(tmp_path / "run", f"--vae={tmp_path / 'depth'}")


def test_the_demos_flags_are_known() -> None:
    demo = Path(__file__).parents[2] / "recipes" / "configs" / "fluxflow_demo.yaml"
    assert parse("", ["--config_path", str(demo)]).training.max_steps > 100


@pytest.mark.slow
def test_accelerate_launch_with_bfloat16(tmp_path: Path) -> None:
    launch = ["--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=bf16", "--dynamo_backend=no"]
    script = ["-m", "hf_memopt.recipes.train_fluxflow", *TINY, f"--output_dir={tmp_path}", "--max_steps=2"]
    more = ["--report_to=tensorboard", "--checkpoint_vae"]
    # The same as the command, without a second interpreter for the launcher.
    launch_command(launch_command_parser().parse_args([*launch, *script, *more]))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["mixed_precision"] == "bf16"
    assert list(tmp_path.rglob("events.out.tfevents.*"))
