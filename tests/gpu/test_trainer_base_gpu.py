"""Tests of a Trainer on a GPU whose model has a frozen base that streams."""

from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_bases import same
from late_imports import LateModule
from offload_trainers import STEPS, decoder, examples
from torch import Tensor, nn

from hf_memopt.weights.base import streamed_weights_of

callbacks = LateModule("hf_memopt.callbacks")
every_trainer = LateModule("hf_memopt.callbacks.every_trainer")
peft = LateModule("peft")
transformers = LateModule("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def with_adapters() -> nn.Module:
    torch.manual_seed(0)
    return peft.get_peft_model(decoder(), peft.LoraConfig(r=4, target_modules="all-linear"))


def make(folder: Path) -> Any:
    arguments = transformers.TrainingArguments(**STEPS | {"output_dir": str(folder), "use_cpu": False, "max_steps": 3})
    arguments._n_gpu = 1  # of several, Trainer would use all by nn.DataParallel
    return transformers.Trainer(with_adapters(), arguments, train_dataset=examples(), eval_dataset=examples()[:4])


def adapters_after(trainer: Any) -> list[Tensor]:
    trainer.train()
    return [each.detach() for each in trainer.model.parameters() if each.requires_grad]


@pytest.mark.parametrize("base", ["host", "file"])
def test_a_base_that_streams_before_the_trainer_is_never_moved_to_the_device(base: str, tmp_path: Path) -> None:
    want = adapters_after(make(tmp_path))
    before = torch.cuda.memory_allocated()
    with every_trainer.attached(callbacks.MemoptArguments(base=base, disk=str(tmp_path), offload_threshold_mb=0.0)):
        trainer = make(tmp_path)
    streamed: Any = streamed_weights_of(trainer.model)
    assert {each.device.type for each in trainer.model.parameters()} == {"cuda"}
    adapters = sum(each.nbytes for each in trainer.model.parameters() if each.requires_grad)
    assert torch.cuda.memory_allocated() - before < adapters + streamed.report().streamed_bytes // 2
    assert same(adapters_after(trainer), want)
    assert streamed.report().device_bytes == 0


def test_attach_says_that_the_trainer_has_moved_the_base(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = adapters_after(make(tmp_path))
    trainer = make(tmp_path)
    handle = callbacks.attach(trainer, base="host")
    assert "has moved the whole model to cuda:0 before attach could run" in caplog.text
    assert same(adapters_after(trainer), want)
    handle.remove()
    assert {each.device.type for each in trainer.model.parameters()} == {"cuda"}
    assert not any(each.isnan().any() for each in trainer.model.parameters())
