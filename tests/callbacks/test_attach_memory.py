from pathlib import Path
from typing import Any

import pytest
import torch
from alone import hide_what_is_alive
from late_imports import LateModule
from torch import Tensor, nn

import hf_memopt

callbacks = LateModule("hf_memopt.callbacks")
transformers = LateModule("transformers")


class Regression(nn.Module):
    """A regression that runs out of memory on demand."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.config = transformers.PretrainedConfig()  # Trainer's model card reads it

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return {"loss": (self.layer(x) - labels).square().mean()}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_what_is_alive(monkeypatch)


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    torch.manual_seed(0)
    data = [{"x": torch.randn(8), "labels": torch.randn(2)} for _ in range(8)]
    settings: dict[str, Any] = {"max_steps": 2, "logging_steps": 1, "use_cpu": True, "report_to": []}
    settings |= {"save_strategy": "no", "dataloader_pin_memory": False, "remove_unused_columns": False}
    return transformers.Trainer(
        Regression(), transformers.TrainingArguments(str(tmp_path), **settings), train_dataset=data
    )


def test_memory_is_logged_until_removed(trainer: Any) -> None:
    handle = hf_memopt.attach(trainer)
    trainer.train()
    assert all("memory/host_rss_gib" in entry for entry in trainer.state.log_history if "loss" in entry)
    handle.remove()
    assert "train" not in vars(trainer)
    assert not any(isinstance(found, callbacks.MemoryLoggingCallback) for found in trainer.callback_handler.callbacks)


def test_a_callback_that_is_there_is_used_and_left_there(trainer: Any) -> None:
    mine = callbacks.MemoryLoggingCallback(warn_at=0.5)
    trainer.add_callback(mine)
    hf_memopt.attach(trainer).remove()
    found = [each for each in trainer.callback_handler.callbacks if isinstance(each, callbacks.MemoryLoggingCallback)]
    assert found == [mine]


def test_an_out_of_memory_error_is_explained_in_itself_and_in_a_file(trainer: Any, tmp_path: Path) -> None:
    hf_memopt.attach(trainer)
    trainer.model.fails = True
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as error:
        trainer.train()
    assert "layer.weight" in error.value.__notes__[0]
    assert (tmp_path / "out_of_memory_rank0.txt").exists()


def test_without_offloader_and_memory_nothing_is_attached(trainer: Any) -> None:
    before = list(trainer.callback_handler.callbacks)
    hf_memopt.attach(trainer, offloader=None, memory=False)
    assert "train" not in vars(trainer)
    assert trainer.callback_handler.callbacks == before


def test_the_model_card_tells_memory_and_time(trainer: Any, tmp_path: Path) -> None:
    handle = hf_memopt.attach(trainer, offloader=None)
    trainer.create_model_card()  # before the first log
    assert "Memory and time" not in (tmp_path / "README.md").read_text()
    trainer.train()
    for _ in range(2):  # each call writes the section anew
        trainer.create_model_card()
        card = (tmp_path / "README.md").read_text()
        assert card.count("## Memory and time in training") == 1
        highest = max(entry["memory/host_rss_gib"] for entry in trainer.state.log_history if "loss" in entry)
        assert f"| peak memory | {highest:.2f} GiB of host memory, by the process" in card
        assert "| update | 1 x 8 samples |" in card
        assert "| activation offloading | off |" in card
    handle.remove()
    trainer.create_model_card()
    assert "Memory and time" not in (tmp_path / "README.md").read_text()
