"""Tests of a GPU with torchao's optimizer on the host: `train_sft --optimizer_on host` beside AdamW on the device."""

from pathlib import Path

import accelerators
import pytest
import torch
from late_imports import LateModule
from safetensors.torch import load_file
from torch import Tensor, nn

torchao_optim = LateModule("torchao.optim")
train_sft = LateModule("hf_memopt.recipes.train_sft")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.leaves_on_device,  # torchao's hooks on weights hold the optimizer, which holds the weights
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# CPU and GPU kernels of AdamW round differently, by a few parts in 100,000 of an update.
SETTINGS = {"lr": 1e-2, "eps": 1e-4}
TOLERANCE = 1e-4 * SETTINGS["lr"]
NUM_UPDATES, ACCUMULATION = 3, 2
FLAGS = [
    *("--max_steps=3", f"--gradient_accumulation_steps={ACCUMULATION}", "--per_device_train_batch_size=4"),
    *("--loss=full", "--learning_rate=0.01", "--adam_epsilon=1e-4", "--max_grad_norm=0", "--bf16=false"),
    *("--logging_steps=1", "--save_strategy=no"),
]


def trained(folder: Path, *flags: str) -> tuple[list[float], dict[str, Tensor]]:
    accelerators.forget_accelerator()
    log = train_sft.main([*FLAGS, f"--output_dir={folder}", *flags])
    return [entry["loss"] for entry in log if "loss" in entry], load_file(folder / "model.safetensors")


def test_the_recipe_trains_as_with_adamw_on_the_device(tmp_path: Path) -> None:
    losses, weights = trained(tmp_path / "device", "--optim=adamw_torch")
    found, same = trained(tmp_path / "host", "--optimizer_on=host")
    assert len(losses) == NUM_UPDATES
    assert found == pytest.approx(losses, rel=1e-6)
    assert same.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(same[name], weight, rtol=0, atol=TOLERANCE)


def test_gradients_add_up_over_micro_batches_and_the_state_is_on_the_host() -> None:
    models, optimizers = [], []
    for kind in (torch.optim.AdamW, torchao_optim.CPUOffloadOptimizer):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to("cuda")
        models.append(model)
        of_host = {} if kind is torch.optim.AdamW else {"optimizer_class": torch.optim.AdamW, "minimal_size": 0}
        optimizers.append(kind(model.parameters(), **of_host, **SETTINGS))
    for update in range(NUM_UPDATES):
        for model, optimizer in zip(models, optimizers, strict=True):
            generator = torch.Generator().manual_seed(update)
            for _ in range(ACCUMULATION):
                model(torch.randn(8, 64, generator=generator).to("cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    states = [state for part in optimizers[1].optim_dict.values() for state in part.state.values()]
    assert len(states) == 4
    assert {state[name].device.type for state in states for name in ("exp_avg", "exp_avg_sq")} == {"cpu"}
