"""Runs of recipes on a GPU: bitwise equal weights with and without offloading."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerators
import pytest
import torch
from recipe_flags import CAUSAL_LM, FLUXFLOW, LGT, NEURAL_OPERATOR
from safetensors.torch import load_file
from torch import Tensor


@pytest.fixture(scope="module", autouse=True)
def heavy_imports() -> None:
    """Import slow libraries in the first test, so that collection stays fast."""
    global AutoencoderKL, fluxflow_report, lgt_evaluation, neural_operator_report, train_causal_lm, train_fluxflow
    global train_lgt, train_neural_operator
    from diffusers import AutoencoderKL

    from hf_memopt.recipes import train_causal_lm, train_fluxflow, train_lgt, train_neural_operator
    from hf_memopt.recipes.fluxflow import report as fluxflow_report
    from hf_memopt.recipes.lgt import report as lgt_evaluation
    from hf_memopt.recipes.neural_operator import report as neural_operator_report


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("quick_plans"),
]

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """A recipe at toy size; `output` is the flag of its folder, `offload` the prefix of its offloading flags."""

    main: Callable[[list[str]], Any]
    flags: tuple[str, ...]
    output: str
    weights: Callable[[Path], Weights]
    offload: str = "--"

    def run(self, folder: Path, *flags: str) -> Weights:
        accelerators.forget_accelerator()
        self.main([*self.flags, f"{self.output}={folder}", *flags])
        return self.weights(folder)


def neural_operator_weights(folder: Path) -> Weights:
    state = torch.load(folder / "model_state_dict.pt", weights_only=False)
    return {name: value.cpu() for name, value in state.items() if isinstance(value, Tensor)}


RECIPES = {
    "language model": Recipe(
        lambda flags: train_causal_lm.main(flags),
        (*CAUSAL_LM, "--max_steps=4", "--eval_every=4"),
        "--output_dir",
        lambda folder: load_file(folder / "model.safetensors"),
    ),
    "neural operator": Recipe(
        lambda flags: train_neural_operator.main(flags),
        (*NEURAL_OPERATOR, "--epochs=2"),
        "--output_dir",
        neural_operator_weights,
    ),
    "LGT": Recipe(
        lambda flags: train_lgt.main(flags),
        tuple(flag for flag in LGT if "cpu_copies" not in flag),
        "--checkpoint.save_dir",
        lambda folder: load_file(folder / "model.safetensors"),
        offload="--offload.",
    ),
    "FluxFlow": Recipe(
        lambda flags: train_fluxflow.main(flags),
        (*FLUXFLOW, "--max_steps=4", "--offload_threshold_mb=0.001"),
        "--output_dir",
        lambda folder: AutoencoderKL.from_pretrained(folder / "vae").state_dict(),
    ),
}


@pytest.fixture(autouse=True)
def only_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Draw no figures, and cache data in the test's folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(neural_operator_report, "draw", lambda rows, file: None)
    monkeypatch.setattr(fluxflow_report, "draw", lambda history, file: None)
    monkeypatch.setattr(lgt_evaluation, "draw_panels", lambda *arguments: None)
    monkeypatch.setattr(lgt_evaluation, "draw_curves", lambda *arguments: None)


@pytest.mark.parametrize("name", RECIPES)
def test_offloading_changes_no_bit_of_the_weights(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    plain = recipe.run(tmp_path / "off", f"{recipe.offload}offload=off")
    for mode in ("all", "auto"):
        offloaded = recipe.run(tmp_path / mode, f"{recipe.offload}offload={mode}")
        assert plain.keys() == offloaded.keys()
        assert all(torch.equal(plain[weight], offloaded[weight]) for weight in plain)


def test_modes_are_compared_by_peak_and_bits(tmp_path: Path) -> None:
    from hf_memopt.exactness.comparison import compare
    from hf_memopt.recipes.common import comparison

    accelerators.forget_accelerator()
    options = train_causal_lm.parse("", [*CAUSAL_LM, f"--output_dir={tmp_path}"], compared=["off", "all"])
    (off, where, plain), (offloaded, _, switched) = (
        comparison.measure("train_causal_lm", comparison.in_mode(options, mode), 4) for mode in ("off", "all")
    )
    assert where["device"] == torch.cuda.get_device_name()
    assert compare(plain, switched).verdict == "equal"
    assert off.peak_mib is not None
    assert offloaded.peak_mib is not None
    assert 0 < offloaded.peak_mib < off.peak_mib
    assert off.process_mib is None
    assert not torch.are_deterministic_algorithms_enabled()
