"""`one_rank.py FOLDER FLAGS`, a process of test_two_processes.py, saves final weights as `rank<number>.safetensors`."""

import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from lerobot_runs import pin_draws
from safetensors.torch import save_file

from hf_memopt.recipes.reflow_smolvla import main as recipe


def main() -> None:
    folder = Path(sys.argv.pop(1))
    end_training = Accelerator.end_training

    def save_and_end(accelerator: Accelerator) -> Any:
        model = accelerator.unwrap_model(accelerator._models[0])
        tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        save_file(tensors, folder / f"rank{accelerator.process_index}.safetensors")
        return end_training(accelerator)

    patch = pytest.MonkeyPatch()
    patch.setattr(Accelerator, "end_training", save_and_end)
    pin_draws(patch)
    recipe()


if __name__ == "__main__":
    main()
