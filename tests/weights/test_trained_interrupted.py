"""Tests that training with a home goes on, to the bit, after errors and interrupts at any place."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier, InjectedError
from adversarial_file import AdversarialFile
from interrupts import Interrupter
from optimizer_toys import equal
from torch import nn
from trained_toys import Training, network

from hf_memopt.transfer import scratch_file
from hf_memopt.transfer.scratch_file import DiskError


def make() -> nn.Module:
    model = network()
    model.norm.eval()  # a micro-batch that is repeated would count twice
    return model


def through_errors(training: Training, num_updates: int = 3) -> int:
    """Repeat passes that fail, and finish updates that do; returns how many failed."""
    num_errors = 0
    for number in range(num_updates):
        go_on: Callable[[], Any] | None = None
        num_found = len(training.found)
        while True:
            try:
                if go_on is None:
                    training.backward(number)
                    go_on = training.optimizer.step
                go_on()
                break
            except (DiskError, InjectedError):
                num_errors += 1
                if go_on is None:
                    training.optimizer.zero_grad()
                    del training.found[num_found:]
                elif training.adopted._update is not None:
                    with pytest.raises(RuntimeError, match="an update was interrupted"):
                        training.optimizer.step()
                    go_on = training.adopted.finish_update
        training.optimizer.zero_grad()
    return num_errors


def places(num_operations: int) -> range:
    """Return operations to fail in turn, some of each kind."""
    return range(1, num_operations + 1, max(3, num_operations // 11))


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.sweep(share=0.5)
def test_training_goes_on_after_any_copy_has_failed(home: str, tmp_path: Path) -> None:
    want = Training(make()).start().run()
    copier = AdversarialCopier()
    Training(make(), home).start(disk=tmp_path, copier=copier).run()
    for fail_at in places(copier.num_operations):
        copier = AdversarialCopier()
        training = Training(make(), home).start(disk=tmp_path, copier=copier)
        copier._fail_at = copier.num_operations + fail_at
        assert through_errors(training) <= 1
        with suppress(InjectedError):
            training.model.state_dict()
        assert equal(training.results(), want.results()), fail_at


def on_a_file(folder: Path) -> tuple[Training, AdversarialFile]:
    """Return a training with gradients and written weights in an adversarial file, made before the first update."""
    training = Training(make(), "file")
    training.weights = None
    file = AdversarialFile(folder, schedule="random")
    training.start(disk=folder)
    home = training.weights._gradients.home
    assert home.file is not None
    (memory,) = home.memories.values()
    memory.file = file  # before anything is written
    memory._space = file.space
    home.file = file
    for slot in training.weights._gradients._slots.values():
        slot.free.clear()
    training.weights._home._places.clear()
    training.weights._home.reserve(torch.device("cpu"))
    training.weights._gradients.reserve()
    return training, file


@pytest.mark.slow
def test_training_goes_on_after_any_operation_of_the_file_has_failed(tmp_path: Path) -> None:
    want = Training(make()).start().run()
    training, file = on_a_file(tmp_path)
    first = file.num_operations
    training.run()
    assert equal(training.results(), want.results())
    for fail_at in places(file.num_operations - first):
        training, its_file = on_a_file(tmp_path)
        its_file._fail_at = first + fail_at
        through_errors(training)
        with suppress(DiskError):  # a state dict writes what no update has written
            training.model.state_dict()
        assert equal(training.results(), want.results()), fail_at


@pytest.fixture(params=["host", "slow file"])
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a home; a slow file is still at work on what an interrupt has cut off when training goes on."""
    home: str = request.param

    def slow(move: Callable[..., None]) -> Callable[..., None]:
        def moved(*arguments: int) -> None:
            time.sleep(chance.random() / 100)
            move(*arguments)

        return moved

    if home == "slow file":
        chance = random.Random(0)
        for name in ("read_memory", "write_memory"):
            monkeypatch.setattr(scratch_file, name, slow(getattr(scratch_file, name)))
    return home.removeprefix("slow ")


PLACES = ("weights/trained", "weights/gradients", "weights/optimizer", "weights/residency", "hf_memopt/transfer")


@pytest.mark.sweep(share=0.5)
def test_passes_are_right_after_an_interrupt_at_any_place(home: str, tmp_path: Path) -> None:
    want = Training(make()).start()
    want.backward(1)
    training = Training(make(), home).start(disk=tmp_path)

    def passes() -> None:
        training.optimizer.zero_grad()
        training.found.clear()
        training.backward(1)

    for place in Interrupter(*PLACES).at_places(passes, 30):
        passes()
        assert equal(training.found, want.found), place
        found = [None if each.grad is None else each.grad.clone() for each in training.model.parameters()]
        assert equal(found, [each.grad for each in want.model.parameters()]), place


@pytest.mark.sweep(share=0.5)
def test_an_interrupted_update_is_finished_or_refused(home: str, tmp_path: Path) -> None:
    training, want = Training(make(), home).start(disk=tmp_path).run(2), Training(make()).start().run(2)
    weights = {name: each.clone() for name, each in training.model.state_dict().items()}
    torch.save(training.optimizer.state_dict(), tmp_path / "state")
    want.update(2)

    def begin() -> None:
        training.model.load_state_dict(weights)
        training.optimizer.load_state_dict(torch.load(tmp_path / "state"))
        training.optimizer.zero_grad()
        training.backward(2)

    interrupter, ends = Interrupter(*PLACES), {"finished": 0, "refused": 0}
    begin()
    interrupter.call(training.optimizer.step)
    count = interrupter.count
    assert training.adopted is not None
    for number in range(1, count + 1, max(1, count // 30)):
        begin()
        interrupter.call(training.optimizer.step, number)
        place = interrupter.place
        if training.adopted._update is None:
            begin()
            training.optimizer.step()
        elif training.adopted._update.is_torn:
            ends["refused"] += 1
            with pytest.raises(RuntimeError, match=r"load a checkpoint by load_state_dict\(\)"):
                training.adopted.finish_update()
            begin()
            training.optimizer.step()
        else:
            ends["finished"] += 1
            training.adopted.finish_update()
        assert equal(training.model.state_dict(), want.model.state_dict()), place
        assert equal(training.optimizer.state_dict(), want.optimizer.state_dict()), place
    assert ends["finished"] > 10


@pytest.mark.e2e
def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    code = f"from trained_toys import trained; trained('file', 1, disk={str(disk)!r}); print('updated'); input()"
    paths = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "updated\n"
        process.kill()
    assert not list(disk.iterdir())
