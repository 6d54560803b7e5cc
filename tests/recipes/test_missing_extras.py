"""Recipes in an environment without their extras: one line says which to install, before any work."""

import os
from collections.abc import Iterator

import pytest
from fork_server import TESTS, Call, ForkServer

pytestmark = pytest.mark.e2e

# Needs none of the extras.
PRELOADED = ("torch", "accelerate")
NEEDED = {
    "train_sft": {"trl": "trl,peft", "peft": "peft"},
    "train_fluxflow": {"diffusers": "fluxflow", "lpips": "fluxflow", "torchvision": "fluxflow"},
    "train_neural_operator": {"neuralop": "neuralop"},
    "reflow_smolvla": {"lerobot": "lerobot"},
    "reflow.demo": {"lerobot": "lerobot", "matplotlib": "report"},
    "landscapes.prepare": {"PIL": "fluxflow"},
}
CASES = [(script, library, extra) for script, needed in NEEDED.items() for library, extra in needed.items()]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    started = ForkServer(PRELOADED, {**os.environ, "PYTHONPATH": paths})
    yield started
    started.close()


@pytest.mark.parametrize(("script", "library", "extra"), CASES)
@pytest.mark.sweep(share=0.1)
def test_a_script_names_the_extra(script: str, library: str, extra: str, server: ForkServer) -> None:
    (ended,) = server.run([Call("hidden_modules:run_script", [f"hf_memopt.recipes.{script}", library])])
    assert (ended.status, ended.returned) == (0, 2), ended.output
    assert "Traceback" not in ended.output
    *_, line = ended.output.splitlines()
    assert f": error: {library} is not installed: pip install 'hf_memopt[{extra}]'" in line
