"""Tests that a seed of a schedule fixes its delays, and the faults that the delays reveal."""

from pathlib import Path

import pytest
import torch

from fake_cuda import device
from fake_cuda.launch import run_pytest

SLEEP_CYCLES = 100_000_000  # 50 ms
MAX_DELAY_S = 0.1
CLEAR_GAP_S = 0.02  # a gap that shows the order of two events, on a busy machine too
NUM_READS = 10

# Each run of this file has a process of its own, as the files of tests/gpu have.
PLANTED = f"""
import pytest
from fake_cuda.test_schedule import read_without_waiting

@pytest.mark.parametrize("num_before", range({NUM_READS}))
def test_what_is_read_is_what_was_copied(num_before):
    if read_without_waiting(num_before) is False:
        pytest.fail("it was read too early")
"""


def train_on_two_streams() -> list[list[float]]:
    """Return the delays of steps with a stream for inputs and another for losses."""
    to_device, to_host = torch.cuda.Stream(), torch.cuda.Stream()
    model = torch.nn.Linear(8, 8, device="cuda")
    batches, losses = torch.ones(5, 4, 8).pin_memory(), torch.zeros(5).pin_memory()
    device.restart_schedule()
    for batch, loss in zip(batches, losses, strict=True):
        with torch.cuda.stream(to_device):
            x = batch.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(to_device)
        x.record_stream(torch.cuda.current_stream())  # its release depends on the streams
        result = model(x).square().mean()
        result.backward()
        to_host.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(to_host):
            loss.copy_(result.detach(), non_blocking=True)
    torch.cuda.synchronize()
    return device.delays()


def test_each_copy_and_kernel_gets_the_same_delay_however_long_others_take() -> None:
    with device.settings(seed=5, max_delay_s=0.001):
        first = train_on_two_streams()
        with device.settings(kernel_s=0.002, bytes_per_s_to_host=1000):
            again = train_on_two_streams()
    assert first == again
    assert len(first) == 3
    assert len({delay for delays in first for delay in delays}) > 10


def test_another_seed_gives_other_delays() -> None:
    found = []
    for seed in [5, 6]:
        with device.settings(seed=seed, max_delay_s=0.001):
            found.append(train_on_two_streams())
    first, other = found
    assert [len(delays) for delays in first] == [len(delays) for delays in other]
    assert first != other


def test_without_a_seed_there_are_no_delays() -> None:
    assert train_on_two_streams() == []


def read_without_waiting(num_before: int) -> bool | None:
    """Return whether a read saw the copy's values, or None if the delays leave that open."""
    side, gate = torch.cuda.Stream(), torch.cuda.Event()
    host, x = torch.ones(100).pin_memory(), torch.zeros(100, device="cuda")
    other = torch.empty_like(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(num_before):
            other.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # copy and read begin when the sleep ends, whenever the host submits them
    gate.record()
    side.wait_event(gate)
    with torch.cuda.stream(side):
        x.copy_(host, non_blocking=True)
    total = x.sum()
    torch.cuda.synchronize()
    of_reads, of_copies = device.delays()
    if abs(of_reads[-1] - of_copies[-1]) < CLEAR_GAP_S:
        return None
    return total.item() == 100


def test_a_missing_wait_is_found_again_with_its_seed() -> None:
    def found_by(seed: int) -> bool | None:
        device.restart_schedule()
        with device.settings(seed=seed, max_delay_s=MAX_DELAY_S):
            return read_without_waiting(num_before=0)

    first = [found_by(seed) for seed in range(NUM_READS)]
    assert first == [found_by(seed) for seed in range(NUM_READS)]
    assert {True, False} <= set(first)


def failures(file: Path, seed: int, only: list[str]) -> list[str]:
    """Return the failing tests of a file, run in a process of its own."""
    tests = [f"{file}::{name}" for name in only] or [str(file)]
    run = run_pytest([*tests, "--schedule-seed", str(seed), "-q", "-rf"], max_delay_s=MAX_DELAY_S)
    assert run.returned in [pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED], run.output
    lines = [line for line in run.output.splitlines() if line.startswith("FAILED")]
    return [line.split("::")[1].split(" ")[0] for line in lines]


def test_a_test_that_fails_does_so_again_with_its_seed_in_another_process_and_alone(tmp_path: Path) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(PLANTED)
    found = failures(file, seed=1, only=[])
    assert 0 < len(found) < NUM_READS
    assert failures(file, seed=1, only=found[-1:]) == found[-1:]
    assert failures(file, seed=2, only=[]) != found
