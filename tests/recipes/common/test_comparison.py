import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_imports import LateModule
from recipe_flags import CAUSAL_LM, FLUXFLOW, LGT, NEURAL_OPERATOR

from hf_memopt.exactness.comparison import compare
from hf_memopt.exactness.recording import Fingerprint, Recording, TensorPlace

pytestmark = pytest.mark.usefixtures("on_the_cpu", "no_shared_cache")

comparison = LateModule("hf_memopt.recipes.common.comparison")
recipe_modules = {
    name: LateModule(f"hf_memopt.recipes.{name}")
    for name in ("train_causal_lm", "train_fluxflow", "train_lgt", "train_neural_operator")
}
FLAGS = {
    "train_causal_lm": CAUSAL_LM,
    "train_fluxflow": (*FLUXFLOW, "--offload_threshold_mb=0.001"),
    "train_lgt": LGT,
    "train_neural_operator": NEURAL_OPERATOR,
}


def options_of(name: str, folder: Path, *more: str) -> Any:
    place = f"--{'checkpoint.save_dir' if name == 'train_lgt' else 'output_dir'}={folder}"
    data = [f"--cache_folder={folder / 'darcy'}"] if name == "train_neural_operator" else []
    return recipe_modules[name].parse("", [*FLAGS[name], "--cpu_copies", place, *data, *more], compared=["off", "all"])


@pytest.mark.e2e
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.sweep(share=0.4)
def test_modes_share_weights_and_batches(name: str, tmp_path: Path) -> None:
    options = options_of(name, tmp_path / "run")
    assert options.output_dir == str(tmp_path / "run")
    off, where, plain = comparison.measure(name, comparison.in_mode(options, "off"), 4)
    offloaded, _, switched = comparison.measure(name, comparison.in_mode(options, "all"), 4)
    losses = [found.sha256 for place, found in plain.tensors.items() if place.phase == "loss"]
    assert len(set(losses)) == len(losses) >= comparison.NUM_CHECKED  # the losses change
    compared = compare(plain, switched)
    assert compared.verdict == "equal"
    assert compared.num_compared.keys() == {"start", "input", "loss", "gradient", "setting", "weight", "optimizer"}
    assert 0 < offloaded.saved_mib < off.saved_mib
    assert offloaded.moved_mib > 0
    assert offloaded.host_mib > 0
    assert min(off.step_ms, offloaded.step_ms) > 0
    assert (where["device"], where["num_processes"]) == ("cpu", 1)
    files = {path.name for path in (tmp_path / "run").iterdir()} if (tmp_path / "run").exists() else set()
    assert files <= {"darcy"}, "a comparison leaves nothing of a training"
    seed = replace(options.training, seed=1)
    other = comparison.recorded(name, comparison.in_mode(options._replace(training=seed), "off"), None, False)
    assert {each.place.phase for each in compare(plain, other).differences} >= {"loss", "gradient", "weight"}


@pytest.mark.slow
def test_what_is_compared_needs_no_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    for name in FLAGS:
        assert options_of(name, tmp_path).output_dir == str(tmp_path)
    parse = recipe_modules["train_causal_lm"].parse
    with pytest.raises(ValueError, match=r"already holds results\.json"):
        parse("", [*CAUSAL_LM, f"--output_dir={tmp_path}"])


def test_running_out_of_memory_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("hf_memopt.recipes.train_causal_lm.update", run_out)
    options = options_of("train_causal_lm", tmp_path / "run")
    cost, where, recording = comparison.measure("train_causal_lm", comparison.in_mode(options, "all"), 4)
    assert (cost.mode, cost.failure, cost.step_ms, recording) == ("all", "out of memory", None, None)
    assert where["device"] == "cpu"


class EndsItsProcess:
    """An object that ends any process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (9,)


@pytest.mark.e2e
def test_a_process_that_is_killed_is_a_result() -> None:
    options = SimpleNamespace(offload=SimpleNamespace(offload="all"), end=EndsItsProcess())
    cost, where, recording = comparison._in_a_new_process("train_lgt", options, 4)
    assert (cost.mode, where, recording) == ("all", {}, None)
    assert cost.failure.startswith("killed")


def test_modes_that_differ_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"off": 1.0, "all": 1.0, "auto": 2.0}

    def recorded(weight: float) -> Recording:
        return Recording({TensorPlace(1, 0, "weight", "w"): Fingerprint.of(torch.tensor([weight]))})

    def measured(name: str, options: Any, num_steps: int) -> Any:
        mode = options.offload.offload
        return comparison.RunCost(mode, step_ms=1.0), {"device": "cpu"}, recorded(weights[mode])

    def again(function: Any, name: str, options: Any, perturbed: str | None, *others: Any) -> Recording:
        return recorded(1.0 if perturbed is None else 1.0 + torch.finfo(torch.float32).eps)

    monkeypatch.setattr("hf_memopt.recipes.common.comparison._in_a_new_process", measured)
    monkeypatch.setattr("hf_memopt.recipes.common.comparison._pooled", again)
    flags = [*CAUSAL_LM, f"--output_dir={tmp_path / 'run'}"]
    assert comparison.compare("train_causal_lm", flags, ["off", "all"], 4)
    assert not comparison.compare("train_causal_lm", flags, ["off", "all", "auto"], 4)
    printed = capsys.readouterr().out
    assert "mode auto: different, not by rounding, first in w after step 1" in printed
    assert [line.split()[0] for line in printed.splitlines() if line.endswith("equal, bit for bit")] == ["all", "all"]
    found = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert (found["recipe"], found["device"], found["num_steps"]) == ("train_causal_lm", "cpu", 4)
    assert [cost.mode for cost in comparison.read_costs(tmp_path / "run")] == ["off", "all", "auto"]
    assert comparison.read_costs(tmp_path) == []


@pytest.mark.parametrize(
    ("flags", "modes", "message"),
    [
        ([], ["off", "inputs"], "offload='inputs' moves the inputs of checkpointed blocks; add --gradient_checkpoint"),
        (["--offload=all", "--budget_gib=1"], ["off", "all"], "budget_gib=1.0 needs --offload auto"),
        (["--plan=8GiB"], ["off", "auto"], "plan='8GiB' chooses a mode, but this compares several; leave --plan"),
        (
            ["--output_dir=FILE"],
            ["off", "auto"],
            "output_dir=.*: .* is a file; name a folder",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_work(
    flags: list[str], modes: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("precious")
    given = [flag.replace("FILE", str(tmp_path / "file")) for flag in flags]
    with pytest.raises(ValueError, match=message):
        comparison.compare("train_causal_lm", [*CAUSAL_LM, *given], modes, 4)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2: modes are compared in one process; use --num_processes 1"):
        comparison.compare("train_lgt", [], ["off", "all"], 4)
