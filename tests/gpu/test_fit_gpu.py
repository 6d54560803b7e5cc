"""`fit` on a GPU: training below limits of its allocator, whose models no constructor moves to the device."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from offload_trainers import STEPS, examples
from torch import Tensor

from hf_memopt.units import GIB, MIB

accelerate = LateModule("accelerate")
fit_module = LateModule("hf_memopt.callbacks.fit")
transformers = LateModule("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make(folder: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4
    )
    arguments = transformers.TrainingArguments(**STEPS | {"output_dir": str(folder), "use_cpu": False, "max_steps": 3})
    arguments._n_gpu = 1  # of several, Trainer would use all by nn.DataParallel
    return transformers.Trainer(
        transformers.LlamaForCausalLM(config), arguments, train_dataset=examples(), eval_dataset=examples()[:4]
    )


def weights_after(trainer: Any) -> list[Tensor]:
    trainer.train()
    return [each.cpu() for _, each in sorted(trainer.model.state_dict().items())]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memopt.callbacks.fit._LEAST_ROOM_BYTES", 2 * MIB)
    monkeypatch.setattr("hf_memopt.callbacks.fit._THRESHOLD_MB", 0.0)


@pytest.mark.parametrize("share", [2.0, 0.8, 0.5])
@pytest.mark.usefixtures("room")
def test_training_below_a_limit_is_the_plain_run(
    share: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hf_memopt.callbacks.fit")
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    trainer = make(tmp_path)
    want = weights_after(trainer)
    added_bytes = torch.cuda.max_memory_reserved() - before_bytes
    del trainer
    torch.cuda.empty_cache()
    limit_bytes = torch.cuda.memory_reserved() + share * added_bytes
    with fit_module.fitted(memory_gib=limit_bytes / GIB, disk=str(tmp_path)):
        trainer = make(tmp_path)
        assert {each.device.type for each in trainer.model.parameters()} == {"cpu"}
        found = weights_after(trainer)
    assert all(map(torch.equal, found, want))
    assert ("everything fits" in caplog.text) == (share > 1)
    assert ("live in" in caplog.text or "leave for" in caplog.text) == (share < 1)


@pytest.mark.usefixtures("room")
def test_a_loop_below_a_limit_is_the_plain_run(tmp_path: Path) -> None:
    def loop() -> list[Tensor]:
        trainer = make(tmp_path)
        model = trainer.model.cpu()
        accelerator = accelerate.Accelerator()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for example in examples()[:6]:
            ids = torch.as_tensor(example["input_ids"])[None].to(accelerator.device)
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
        return [each.cpu() for _, each in sorted(model.state_dict().items())]

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_reserved()
    want = loop()
    added_bytes = torch.cuda.max_memory_reserved() - before_bytes
    torch.cuda.empty_cache()
    limit_bytes = torch.cuda.memory_reserved() + 0.5 * added_bytes
    with fit_module.fitted(memory_gib=limit_bytes / GIB, disk=str(tmp_path)) as fit:
        found = loop()
        assert any(each.home is not None for each in fit._states)
    assert all(map(torch.equal, found, want))
