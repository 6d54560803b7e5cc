"""The GPU's tests on the fake CUDA runtime, each file in a process of its own."""

import os
from pathlib import Path

import pytest
from fake_cuda.build import CannotBuildError, built
from fake_cuda.launch import run_pytest

TESTS = Path(__file__).parent
FILES = sorted(
    path.relative_to(TESTS) for folder in ["fake_cuda", "gpu"] for path in (TESTS / folder).glob("test_*.py")
)
# They take longest; make test-slow runs them.
SLOW = ("test_benchmarks_gpu.py", "test_full_device_gpu.py", "test_many_steps_gpu.py", "test_recipes_gpu.py")
# Seeds the delays of copies and kernels; HF_MEMOPT_SEED chooses other ones.
SCHEDULE = os.environ.get("HF_MEMOPT_SEED", "1")
LONGEST_DELAY_S = 0.0003
# Some files have only slow tests.
PASSED = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
REQUIRED = bool(os.environ.get("HF_MEMOPT_REQUIRE_FAKE_GPU"))


@pytest.fixture(scope="module")
def fake_gpu() -> None:
    try:
        built()
    except CannotBuildError as error:
        if REQUIRED:
            pytest.fail(f"continuous integration needs the fake GPU: {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(
    "file", [pytest.param(each, marks=pytest.mark.slow if each.name in SLOW else [], id=str(each)) for each in FILES]
)
def test_files_pass_on_the_fake_gpu(file: Path) -> None:
    schedule = [] if file.parts[0] == "fake_cuda" else ["--schedule-seed", SCHEDULE]
    run = run_pytest([str(TESTS / file), "-m", "not slow", "-q", *schedule], max_delay_s=LONGEST_DELAY_S, devices=2)
    if run.status or run.returned not in PASSED:
        pytest.fail(f"{file} on the fake GPU, {' '.join(schedule)}:\n{run.output}", pytrace=False)
