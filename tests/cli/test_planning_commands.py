"""`hf-memopt estimate` and `plan`: output, files, charts and refusals."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

from hf_memopt.cli import main, planning_commands

accelerate_config = LateModule("hf_memopt.planning.models.accelerate_config")
transformers = LateModule("transformers")


Capture = pytest.CaptureFixture[str]
SMALL = ["--seq-len", "32", "--batch-size", "2", "--precision", "bf16"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=16, vocab_size=512).save_pretrained(folder)
    return str(folder)


def test_it_prints_the_verdict_first_and_then_the_phase(model: str, tmp_path: Path, capsys: Capture) -> None:
    files = ["--json", str(tmp_path / "estimate.json"), "--timeline", str(tmp_path / "timeline.html")]
    files += ["--snapshot", str(tmp_path / "step.pickle")]
    assert main(["estimate", model, *SMALL, "--gpu", "rtx4070-laptop", *files]) == 0
    printed = capsys.readouterr().out
    assert re.match(
        rf"SFTTrainer of {re.escape(model)} as \w+, .*\n\nIt fits on rtx4070-laptop \(7.75 GiB\). The step needs "
        r"\d\.\d\d GiB\.\nThe peak, \d\.\d\d GiB allocated, is in ",
        printed,
    )
    assert "assumed, device context 512 MiB" in printed
    assert "Time of a step" in printed
    assert f"snapshot, for https://pytorch.org/memory_viz: {tmp_path / 'step.pickle'}" in printed
    assert (tmp_path / "step.pickle").stat().st_size > 1000
    found = json.loads((tmp_path / "estimate.json").read_text())
    assert found["card"] == {"name": "rtx4070-laptop", "memory_bytes": 7936 * 2**20, "verdict": "fits"}
    assert found["peak_bytes"] == sum(found["breakdown"].values())
    html = (tmp_path / "timeline.html").read_text()
    assert "Estimated memory of" in html
    assert "Largest tensors at the peak" in html
    assert not re.search(r'(?:src|href)="(?!data:)', html)


@pytest.mark.e2e
def test_without_a_card_it_says_nothing_about_one(model: str, capsys: Capture) -> None:
    assert main(["estimate", model, *SMALL, "--offload", "all", "--accumulation", "2"]) == 0
    printed = capsys.readouterr().out
    assert "fit" not in printed
    assert "The step needs 0." in printed
    assert "Time of a step" not in printed


@pytest.mark.e2e
def test_it_can_guard_a_launch(model: str, capsys: Capture) -> None:
    arguments = ["estimate", model, *SMALL, "--gpu", "640MiB"]
    assert main(arguments) == 0
    assert "It does not fit on 640MiB" in capsys.readouterr().out
    assert main([*arguments, "--check"]) == 1
    assert main([*arguments[:-1], "8GiB", "--check"]) == 0


@pytest.mark.e2e
@pytest.mark.slow
def test_where_it_does_not_fit_it_says_how_to_look_for_what_does(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = ["--lora-rank", "2", "--lora-targets", "q_proj,v_proj", "--max-grad-norm", "none", "--dtype", "bfloat16"]
    assert main(["estimate", model, *SMALL, "--accumulation", "3", *adapters, "--gpu", "640MiB"]) == 0
    said = capsys.readouterr().out.splitlines()[-1].partition("Settings that fit, if there are any: ")[2]
    given: dict[str, Any] = {}
    monkeypatch.setattr(planning_commands, "_plan", lambda spec: given.update(vars(spec)) or 0)
    assert main(shlex.split(said)[1:]) == 0
    assert (given["model"], given["gpu"], given["effective_batch"], given["seq_len"]) == (model, "640MiB", 6, 32)
    assert (given["lora_rank"], given["lora_targets"], given["max_grad_norm"]) == (2, "q_proj,v_proj", "none")
    assert (given["precision"], given["dtype"], given["quantize"]) == ("bf16", "bfloat16", None)
    assert main(["estimate", model, *SMALL, "--gpu", "8GiB"]) == 0
    assert "Settings that fit" not in capsys.readouterr().out


@pytest.mark.e2e
@pytest.mark.slow
def test_frozen_weights_stream_from_a_file(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = ["--lora-rank", "2", "--base", "file", "--disk", "1GiB@1MBps"]
    assert main(["estimate", model, *SMALL, *streamed, "--gpu", "640MiB@rtx4070"]) == 0
    printed = capsys.readouterr().out
    assert "of the device at most, 0.00 GiB brought in a step, read from files" in printed
    assert "waiting for copies" in printed
    said = printed.splitlines()[-1].partition("Settings that fit, if there are any: ")[2]
    given: dict[str, Any] = {}
    monkeypatch.setattr(planning_commands, "_plan", lambda spec: given.update(vars(spec)) or 0)
    assert main(shlex.split(said)[1:]) == 0
    assert (given["base"], given["disk"]) == (None, "1GiB@1MBps")
    monkeypatch.undo()
    options = ["--gpu", "8GiB@rtx4070", "--effective-batch", "2", "--workers", "1"]
    assert main(["plan", model, "--seq-len", "32", *streamed, *options]) == 0
    printed = capsys.readouterr().out
    assert "Train with micro-batch 2 x 1, activations on the device, frozen weights in a file.\n" in printed
    assert " tokens per second." in printed
    written = Path("plans", Path(model).name)
    command = f"accelerate launch --config_file {written}/accelerate.yaml -m hf_memopt.recipes.train_sft"
    assert printed.endswith(
        f"\nRun it with the files in {written}, after pip install trl peft:\n  {command} --config {written}/sft.yaml\n"
    )
    assert sorted(path.name for path in written.iterdir()) == ["accelerate.yaml", "sft.yaml"]


@pytest.mark.e2e
@pytest.mark.slow
def test_every_pass_of_an_update_takes_time(model: str, tmp_path: Path) -> None:
    def step_ms(accumulation: int) -> float:
        file = tmp_path / "estimate.json"
        arguments = ["--gpu", "rtx4090", "--accumulation", str(accumulation), "--json", str(file)]
        assert main(["estimate", model, *SMALL, *arguments]) == 0
        return float(json.loads(file.read_text())["step_ms"])

    twice, often = step_ms(2), step_ms(16)
    assert 6 * twice < often < 8 * twice


@pytest.mark.e2e
@pytest.mark.slow
def test_figures_of_several_gpus_are_those_of_one(model: str, tmp_path: Path, capsys: Capture) -> None:
    ranks = ["--num-gpus", "2", "--engine", "fsdp2", "--seq-len", "32", "--precision", "bf16"]
    assert main(["estimate", model, *ranks, "--batch-size", "2", "--gpu", "640MiB"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{model} as Qwen3ForCausalLM in float32, on each of 2 GPUs with fsdp2\n\n")
    assert "gathered weights" in printed
    assert "NCCL takes 0.5 to 2.0 GiB beside that." in printed
    assert "Of one GPU. Time for communication is not in it." in printed
    assert printed.endswith("--effective-batch 4 --precision bf16 --engine fsdp2 --seq-len 32 --num-gpus 2\n")
    arguments = ["--gpu", "8GiB", "--effective-batch", "4", "--workers", "1", "--output", str(tmp_path)]
    assert main(["plan", model, *ranks, *arguments]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^\| 2 x 1 +\| kept", printed, re.MULTILINE)
    assert "Of one GPU." in printed
    assert "distributed_type: FSDP" in (tmp_path / "accelerate.yaml").read_text()


@pytest.mark.slow
def test_a_recipe_is_estimated_with_its_own_configuration(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text.txt").write_text("Das Wasser fliesst, und der Stein bleibt liegen. " * 400)
    data = {"text_file": [str(tmp_path / "text.txt")], "block_size": 32}
    (tmp_path / "lm.json").write_text(json.dumps({"model": {"vocab_size": 300}, "data": data}))
    recipe = ["estimate", "--recipe", "train_causal_lm", "--config", str(tmp_path / "lm.json"), "--batch-size", "4"]
    assert main(recipe) == 0
    assert capsys.readouterr().out.startswith("qwen3 from scratch\n\n")
    assert main([*recipe, "--set", "activations=nowhere"]) == 2
    assert "set='activations=nowhere' is not a value of a lever; there are activations=kept|" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a MODEL"),
        (["/nowhere"], "model='/nowhere'"),
        (["MODEL", "--gpu", "24"], "gpu='24' is neither a size with its unit such as 8GiB, nor"),
        (["MODEL", "--check"], "--check asks whether it fits on a card, so it needs --gpu"),
        (
            ["MODEL", "--lora-rank", "8", "--base-budget", "3GiB"],
            "--base-budget='3GiB' is for frozen weights that stream; give --base=host or file",
        ),
        (["MODEL", "--offload", "auto"], "--offload='auto' weighs copies against compute, so it needs --gpu"),
        (["MODEL", "--recipe", "train_causal_lm"], "name one of them"),
        (["MODEL", "--set", "a=b"], "--set='a=b' is for recipes and robot policies; a model's settings have own flags"),
        (["--recipe", "train_causal_lm"], "needs --config=FILE"),
        (["--recipe", "train_causal_lm", "--num-gpus", "2"], "--num-gpus=2: recipes are simulated on one GPU"),
        (
            ["--recipe", "train_nothing", "--config", "x"],
            "choose from causal_lm, fluxflow, lgt, neural_operator, reflow_smolvla, sft",
        ),
    ],
)
def test_what_it_refuses(arguments: list[str], message: str, model: str, capsys: Capture) -> None:
    assert main(["estimate", *(model if each == "MODEL" else each for each in arguments), "--seq-len", "32"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_a_plan_tries_all_levers_of_a_recipe(capsys: Capture) -> None:
    assert main(["plan", "--recipe", "lgt", "--config", "x", "--gpu", "8GiB", "--set", "activations=kept"]) == 2
    assert "--set='activations=kept': a plan tries all values of a recipe's levers" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer_on", ["nvme", "host"])
def test_the_file_of_an_earlier_plan_is_not_the_one_to_change(optimizer_on: str, tmp_path: Path) -> None:
    for place in ("nvme", optimizer_on):
        sharing = accelerate_config.Sharing("zero3", 1, place, "host")
        accelerate_config.write_accelerate_config(tmp_path / "accelerate.yaml", "bf16", sharing)
    assert (tmp_path / "deepspeed.json").is_file()
    line = planning_commands._missing_folder(tmp_path, "accelerate launch")
    assert line.startswith("First change /" if optimizer_on == "nvme" else "Add --disk FOLDER")
