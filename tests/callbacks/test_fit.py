"""`fit`: what it moves under which limit, and that training stays what it is."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from offload_trainers import decoder, examples
from torch import Tensor, nn

from hf_memopt.memory.device_counters import DeviceMemory
from hf_memopt.memory.memory_limit import LimitedMemory, limited_memory
from hf_memopt.units import KIB, MIB
from hf_memopt.weights.base import streamed_weights_of
from hf_memopt.weights.optimizer import offloaded

accelerate = LateModule("accelerate")
callbacks = LateModule("hf_memopt.callbacks")
fit_module = LateModule("hf_memopt.callbacks.fit")
every_trainer = LateModule("hf_memopt.callbacks.every_trainer")
peft = LateModule("peft")
trl_trainers = LateModule("trl_trainers")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fit on a CPU needs Linux")
USED, STATE = 100 * MIB, 2  # bytes of state for each of a parameter


class Books:
    """Counters of a process with constant memory in use and, in steps, a peak beyond it."""

    peak_bytes = USED

    def read(self) -> DeviceMemory:
        return DeviceMemory(USED, self.peak_bytes, USED)

    def reset_peaks(self) -> None:
        pass

    def free_and_total(self) -> tuple[int, int]:
        return 2**40, 2**40


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """A function that sets the limit, to a process that has `USED` bytes; small storages move."""

    def limit(usable_bytes: float) -> None:
        found = LimitedMemory(Books(), round(usable_bytes / fit_module.USABLE))
        monkeypatch.setitem(memory_limit()._LIMITED, "cpu", found)
        monkeypatch.setattr("hf_memopt.callbacks.fit.limit_memory", lambda *_: found)

    monkeypatch.setattr("hf_memopt.callbacks.fit._LEAST_ROOM_BYTES", 0)
    monkeypatch.setattr("hf_memopt.callbacks.fit._THRESHOLD_MB", 0.0)
    return limit


def memory_limit() -> Any:
    return LateModule("hf_memopt.memory.memory_limit")


def sizes(model: nn.Module) -> tuple[int, int]:
    parameters = list(model.parameters())
    return sum(each.nbytes for each in parameters), max(each.nbytes for each in parameters)


def trained(trainer: Any) -> list[Tensor]:
    trainer.train()
    return [each.clone() for _, each in sorted(trainer.model.state_dict().items())]


def same(found: list[Tensor], want: list[Tensor]) -> bool:
    return len(found) == len(want) and all(map(torch.equal, found, want))


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(text for text in caplog.messages if text.startswith("fit: "))


def with_adapters() -> nn.Module:
    torch.manual_seed(0)
    return peft.get_peft_model(decoder(), peft.LoraConfig(r=4, target_modules="all-linear"))


def test_what_fits_is_left_alone(make: Any, limited: Any, caplog: pytest.LogCaptureFixture) -> None:
    want = trained(make())
    caplog.set_level(logging.INFO, "hf_memopt.callbacks.fit")
    limited(USED + 100 * MIB)
    trainer = make()
    handle = callbacks.attach(trainer, fit=True)
    assert same(trained(trainer), want)
    assert "fit: everything fits; from now on nothing is changed" in said(caplog)
    assert "live in" not in said(caplog)
    assert streamed_weights_of(trainer.model) is None
    assert offloaded(trainer.optimizer.optimizer) is None
    handle.remove()
    assert "train" not in vars(trainer)
    assert limited_memory(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("share", "lines"),
    [
        pytest.param(2.2, ["of AdamW's state live in a file"], id="state"),
        pytest.param(1.5, ["fit: weights live in a file"], id="weights"),
    ],
)
def test_parts_leave_as_far_as_needed(
    share: float, lines: list[str], make: Any, limited: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The share is that of the weights, which gradients and state take once and twice more."""
    want = trained(make())
    caplog.set_level(logging.INFO, "hf_memopt.callbacks.fit")
    trainer = make()
    weights_bytes, largest_bytes = sizes(trainer.model)
    limited(USED + share * weights_bytes - weights_bytes + 2 * largest_bytes)
    callbacks.attach(trainer, fit=True)
    assert same(trained(trainer), want)
    for line in lines:
        assert line in said(caplog)


def test_saved_activations_leave_where_a_pass_has_no_room(
    make: Any, limited: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = trained(make())
    caplog.set_level(logging.INFO, "hf_memopt.callbacks.fit")
    trainer = make()
    weights_bytes, _ = sizes(trainer.model)
    monkeypatch.setattr(Books, "peak_bytes", USED + 8 * weights_bytes)
    limited(USED + 10 * weights_bytes + 64 * KIB)  # and the state comes
    callbacks.attach(trainer, fit=True)
    assert same(trained(trainer), want)
    assert "fit: saved activations leave for a file" in said(caplog)


def test_a_frozen_base_streams(make: Any, limited: Any, caplog: pytest.LogCaptureFixture) -> None:
    want = trained(make(with_adapters()))
    caplog.set_level(logging.INFO, "hf_memopt.callbacks.fit")
    limited(0.9 * USED)
    trainer = make(with_adapters())
    handle = callbacks.attach(trainer, fit=True)
    with pytest.raises(fit_module.DoesNotFitError, match=r"training needs .*give it --memory 1"):
        trainer.train()
    handle.remove()
    limited(USED + 2 * sizes(with_adapters())[1])
    trainer = make(with_adapters())
    callbacks.attach(trainer, fit=True)
    assert same(trained(trainer), want)
    assert "fit: frozen weights live in a file" in said(caplog)


@pytest.mark.parametrize("is_tight", [False, True])
def test_a_loop_on_accelerate_is_what_it_is_without(is_tight: bool, limited: Any, tmp_path: Path) -> None:
    def loop() -> list[Tensor]:
        torch.manual_seed(0)
        model = decoder()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for example in examples():
            with accelerator.accumulate(model):
                ids = torch.as_tensor(example["input_ids"])[None]
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return [each.clone() for _, each in sorted(model.state_dict().items())]

    want = loop()
    limited(USED + 100 * MIB)
    with fit_module.fitted(disk=str(tmp_path)) as fit:
        fit.is_tight = is_tight
        found = loop()
        assert any(each.weights is not None for each in fit._models) == is_tight
    assert same(found, want)
    assert accelerate.Accelerator.__init__.__module__ == "accelerate.accelerator"


def test_a_model_is_trained_again(make: Any, limited: Any) -> None:
    plain = make()
    want = trained(plain), trained(plain)
    trainer = make()
    weights_bytes, largest_bytes = sizes(trainer.model)
    limited(USED + weights_bytes // 2 + 2 * largest_bytes)
    callbacks.attach(trainer, fit=True)
    for each in want:
        assert same(trained(trainer), each)


def test_a_reference_model_visits(limited: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_memopt.callbacks.fit")
    make = trl_trainers.dpo
    want = trained(make(tmp_path))
    trainer = make(tmp_path)
    limited(USED + sizes(trainer.model)[0])
    callbacks.attach(trainer, fit=True)
    assert same(trained(trainer), want)
    assert "fit: ref_model live" in said(caplog)


@pytest.mark.parametrize("options", [{"base": "host"}, {"offloader": None}, {"leak_check": True}])
def test_attach_decides_alone(options: dict[str, Any], make: Any) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"fit=True decides {name} by itself, and {name}="):
        callbacks.attach(make(), fit=True, **options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"fit": True, "base": "file"}, "fit=True decides base by itself, and base=file"),
        ({"memory_gib": 1.0}, "memory_gib=1.0 needs fit=True, and fit=False"),
        ({"max_waiting": 1.0}, "max_waiting=1.0 needs fit=True"),
        ({"fit": True, "memory_gib": 0.0}, "memory_gib=0.0 must be above 0"),
    ],
)
def test_arguments_that_contradict_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        callbacks.MemoptArguments(**options)


def test_several_processes_and_engines_are_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    trainer.accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    try:
        with pytest.raises(ValueError, match="fit=True: FSDP places weights and optimizer states already"):
            callbacks.attach(trainer, fit=True)
    finally:
        trainer.accelerator.state.distributed_type = accelerate.DistributedType.NO
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="fit=True decides for one process, and WORLD_SIZE"):
        callbacks.attach(trainer, fit=True)


def test_training_that_waits_too_long_is_ended(make: Any, limited: Any, tmp_path: Path) -> None:
    trainer = make()
    weights_bytes, largest_bytes = sizes(trainer.model)
    limited(USED + weights_bytes // 2 + 2 * largest_bytes)
    arguments = callbacks.MemoptArguments(fit=True, disk=str(tmp_path), max_waiting=0.0)
    arguments.attach(trainer)
    with pytest.raises(fit_module.DoesNotFitError, match=r"training waits for .* and may for 0%"):
        trainer.train()
