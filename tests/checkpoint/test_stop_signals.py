"""Tests that SIGTERM and SIGINT are noted in a loop, answered where it can save, and as before afterwards."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_run import NUM_STEPS, ToyRun

from hf_memopt.checkpoint import Checkpoints
from hf_memopt.checkpoint.checkpoints import StopSignals

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Restore SIGINT, which a shell ignores in background processes, and Python after it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_signal_is_noted_and_only_a_sigint_after_it_interrupts() -> None:
    signals = StopSignals()
    for numbers in ((signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM), (signal.SIGTERM,)):
        with signals.listening():
            assert signals.received == 0
            for number in numbers:
                signal.raise_signal(number)
        assert signals.received == numbers[0]
    with signals.listening():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signals.received == signal.SIGTERM


def test_the_handlers_from_before_are_back_after_an_error() -> None:
    def fail_after_a_signal() -> None:
        with StopSignals().listening():
            signal.raise_signal(signal.SIGTERM)
            raise ZeroDivisionError

    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(ZeroDivisionError):
            fail_after_a_signal()
        assert seen == []
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def train_until_stopped(run: ToyRun, number: int) -> None:
    """Train as recipes do; the signal comes in the third step."""
    with run.checkpoints.stopping_on_signal():
        for step in range(1, NUM_STEPS):
            if step == 3:
                os.kill(os.getpid(), number)
            run.train(step)
            if run.checkpoints.stop_requested():
                run.save()
                break
    pytest.fail("went on")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_each_signal_saves_and_ends_with_its_status(
    number: int, status: int, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        train_until_stopped(ToyRun(tmp_path), number)
    assert ended.value.code == status
    assert signal.getsignal(number) is before
    resumed = ToyRun(tmp_path)
    resumed.resume()
    assert resumed.num_steps == 3
    resumed.train()
    assert resumed.state() == uninterrupted


def send(checkpoints: Checkpoints, *numbers: int, ask: bool, error: Exception | None = None) -> None:
    """Send signals in a loop's last step, and fail there if given an error."""
    with checkpoints.stopping_on_signal():
        assert not checkpoints.stop_requested()
        for number in numbers:
            os.kill(os.getpid(), number)
            assert not ask or checkpoints.stop_requested()
        if error is not None:
            raise error


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    checkpoints = ToyRun(tmp_path).checkpoints
    with pytest.raises(KeyboardInterrupt):  # not SystemExit: launchers repeat SIGTERM
        send(checkpoints, signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, ask=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(SystemExit, match="143"):
        send(checkpoints, signal.SIGTERM, signal.SIGTERM, ask=True)


def test_a_signal_after_the_last_step_is_not_lost(tmp_path: Path) -> None:
    checkpoints = ToyRun(tmp_path).checkpoints
    with pytest.raises(KeyboardInterrupt):
        send(checkpoints, signal.SIGINT, ask=False)
    send(checkpoints, ask=False)  # not taken for one of the next loop


def test_an_error_in_the_loop_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        send(ToyRun(tmp_path).checkpoints, signal.SIGTERM, ask=True, error=ZeroDivisionError())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
