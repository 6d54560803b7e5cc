"""The recipe with the files of a plan whose engine keeps the optimizer on the host, beside the run on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_builds import ADAM, built, needs_builds
from late_imports import LateModule
from launched_files import added_environment
from ranks import on_ranks
from safetensors.torch import load_file
from torch import Tensor
from transformers_toys import workload_of

conversations = LateModule("hf_memopt.recipes.sft.model")

# An epsilon that no rounding of a gradient near zero can be seen beside.
FLAGS = ["--max_steps=2", "--logging_steps=1", "--learning_rate=0.01", "--adam_epsilon=1e-4", "--save_strategy=no"]
OF_DEEPSPEED = 2e-6
HOST: dict[str, Any] = {"optimizer_on": "host"}
LORA: dict[str, Any] = {"lora_rank": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(conversations.write_tiny_model(tmp_path_factory.mktemp("model"), seed=0))


def trained(model: str, folder: Path, options: dict[str, Any], **environment: str) -> tuple[Any, dict[str, Tensor]]:
    """Return losses and the saved weights of the run that a plan for these options prints."""
    folder.mkdir()
    usual = {"dtype": "float32", "precision": "no"}
    planned = workload_of(model, seq_len=64, effective_batch=4, **usual, **options)
    chosen = {lever.name: lever.values[0] for lever in planned.levers} | {"activations": "checkpointed"}
    launch, fields = planned.write(chosen, 2, folder)
    flags = ["--config", str(fields), f"--output_dir={folder / 'run'}", *FLAGS]
    (losses,) = on_ranks("planned_recipe_rank:outcomes", flags, num_ranks=1, **environment, **added_environment(launch))
    (saved,) = (folder / "run").glob("*model.safetensors")
    return losses, load_file(saved)


@pytest.mark.e2e
@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
def test_fsdp2_on_the_host_trains_and_saves_the_same_bits(model: str, options: Any, tmp_path: Path) -> None:
    losses, weights = trained(model, tmp_path / "plain", options)
    found, same = trained(model, tmp_path / "host", options | HOST | {"engine": "fsdp2"})
    assert len(losses) == 2
    assert found == losses
    assert same.keys() == weights.keys()
    assert all(torch.equal(same[name], weights[name]) for name in weights)


@pytest.mark.e2e
@needs_builds
def test_deepspeed_on_the_host_trains_and_saves_the_same(model: str, tmp_path: Path) -> None:
    losses, weights = trained(model, tmp_path / "plain", {})
    for engine, weights_on in (("zero2", "device"), ("zero3", "host")):
        options = HOST | {"engine": engine, "weights_on": weights_on}
        found, same = trained(model, tmp_path / engine, options, **built(ADAM))
        assert found == pytest.approx(losses, abs=OF_DEEPSPEED)
        assert same.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(same[name], weight, rtol=0, atol=OF_DEEPSPEED)
