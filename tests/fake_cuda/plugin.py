"""A pytest plugin for a process of `launch.py`: after each test, faults and resources left on devices are errors."""

import gc
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from fake_cuda import device

ExpectFaults = Callable[..., None]

LONGEST_MOMENT_S = 20  # on a busy machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedule-seed", type=int, default=None, help="delay each copy and kernel of the fake device by this schedule"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not device.is_loaded():
        raise pytest.UsageError("fake_cuda.plugin needs a process that fake_cuda.launch has started")
    device.install_operators()


@pytest.fixture(autouse=True)
def _schedule(request: pytest.FixtureRequest) -> Iterator[None]:
    seed = request.config.getoption("--schedule-seed")
    device.restart_schedule()  # so that a failure repeats when its test runs alone
    with device.settings(**({} if seed is None else {"seed": seed})):
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze earlier objects, so that no collection after a test walks them."""
    gc.collect()
    gc.freeze()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _no_faults(request: pytest.FixtureRequest, _schedule: None) -> Iterator[None]:
    device.forget_faults()
    before = device.holdings()
    yield
    request.node.funcargs.clear()  # drops the values of other fixtures
    found = device.faults()
    if torch.cuda.get_sync_debug_mode():
        torch.cuda.set_sync_debug_mode("default")
        found.append("the sync debug mode was left on")
    left = _left_since(before)  # waits, so that work on its way has ended
    found += [fault for fault in device.faults() if fault not in found]
    device.forget_faults()
    # The traceback of a failed test keeps the test's objects alive.
    if not request.node.stash[FAILED] and request.node.get_closest_marker("leaves_on_device") is None:
        found += left
    if found:
        pytest.fail("the fake CUDA runtime has found\n  " + "\n  ".join(found), pytrace=False)


def _left_since(before: device.Holdings) -> list[str]:
    """Wait first, for autograd's thread to drop the last backward node."""
    deadline = time.monotonic() + LONGEST_MOMENT_S
    while (left := device.holdings().more_than(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


@pytest.fixture
def expect_faults(_no_faults: None) -> ExpectFaults:
    """Take planted faults: the faults so far must contain the given texts, one each and no other."""

    def expect(*texts: str) -> None:
        found = device.faults()
        device.forget_faults()
        missing = [text for text in texts if not any(text in fault for fault in found)]
        others = [fault for fault in found if not any(text in fault for text in texts)]
        assert not missing, f"not found: {missing} in {found}"
        assert not others, f"found as well: {others}"

    return expect
