"""The environment of the test suite, and shared toy models, data and checkpoints."""

import gc
import logging
import math
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from late_imports import IMPORTED_WHILE_COLLECTING, SLOW

# Set before torch and huggingface_hub are imported. Tests run side by side, so that more threads would only compete,
# and no test may depend on the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

# Tiny models, data and machines are imported by name, in the processes that tests start too.
TOYS = str(Path(__file__).parent / "toys")
sys.path.insert(0, TOYS)
sys.path.append(str(Path(__file__).parents[1]))  # benchmarks
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TOYS, os.environ.get("PYTHONPATH")]))

# Another seed chooses another part of each sweep: HF_MEMOPT_SEED=7 make test.
SEED = os.environ.get("HF_MEMOPT_SEED", "0")

# Markers by folder or file, which have targets of their own.
KINDS = {"distributed": "ranks", "test_fake_gpu.py": "fake_gpu", "canaries": "canary"}

# These tests need processes of their own: on the fake CUDA runtime, which tests/test_fake_gpu.py starts, or with a
# library that others must not see, which tests/test_bitsandbytes.py starts.
collect_ignore_glob = [] if "FAKE_CUDA_LIBRARIES" in os.environ else ["fake_cuda/*"]
if find_spec("bitsandbytes") is None:
    collect_ignore_glob.append("apart/*")

# The same examples in each run, without those of earlier runs, and no time limits, since machines are slow or busy.
hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Give Hugging Face's libraries caches and settings apart from the user's own."""
    home = tempfile.TemporaryDirectory()
    config.add_cleanup(home.cleanup)
    os.environ["HF_HOME"] = home.name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their kind, and most of each sweep as slow, before the marker expression is applied."""
    for item in items:
        folder, *_ = item.path.relative_to(Path(__file__).parent).parts
        if folder in KINDS:
            item.add_marker(KINDS[folder])
    sweeps: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps.setdefault((item.path, item.originalname), []).append(item)
    for sweep in sweeps.values():
        share = sweep[0].get_closest_marker("sweep").kwargs["share"]
        by_lot = sorted(sweep, key=lambda item: zlib.crc32(f"{SEED} {item.name}".encode()))
        for item in by_lot[math.ceil(share * len(sweep)) :]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[IMPORTED_WHILE_COLLECTING] = [name for name in SLOW if name in sys.modules]


@pytest.fixture(autouse=True)
def no_mode_of_an_interrupted_test() -> None:
    """Reset torch's flags of active dispatch modes, which an interrupt in a mode's `__exit__` leaves set."""
    dispatch: Any = sys.modules.get("torch.utils._python_dispatch")
    if dispatch is not None and sys.modules["torch"]._C._len_torch_dispatch_stack() == 0:
        dispatch._is_in_torch_dispatch_mode = dispatch._is_in_non_infra_torch_dispatch_mode = False


@pytest.fixture(scope="session", autouse=True)
def no_relative_paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run in an empty folder, where files of the demos in `outputs/` are out of reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        yield


@pytest.fixture(scope="session", autouse=True)
def autograd_may_be_forked() -> None:
    """Run a backward before all tests, so that estimates can fork processes in any order of the tests.

    Without an accelerator, autograd starts threads for one and refuses later forks, if a FakeTensorMode, such as
    torch.compile's, comes before a process's first backward.
    """
    import torch

    if not torch.accelerator.is_available():
        torch.zeros(1, requires_grad=True).sum().backward()


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], Any]]:
    from benchmark_runs import loaded_benchmarks

    with loaded_benchmarks() as load:
        yield load


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source archives and wheels of library and plug-in, by the beginning of their names."""
    from built_wheels import PLUGIN, build, copy_library, copy_plugin

    library = build(copy_library(tmp_path_factory.mktemp("library")), tmp_path_factory.mktemp("dist"))
    plugin = build(copy_plugin(tmp_path_factory.mktemp("plugin")), tmp_path_factory.mktemp("dist"))
    names = ("hf_memopt.whl", "hf_memopt.tar.gz", f"{PLUGIN}.whl", f"{PLUGIN}.tar.gz")
    return dict(zip(names, (*library, *plugin), strict=True))


@pytest.fixture(scope="session")
def installed(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The `Environment` of a user who has installed both wheels, and has no clone."""
    from built_wheels import Environment

    return Environment(
        tmp_path_factory.mktemp("environment"), [path for path in archives.values() if path.suffix == ".whl"]
    )


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


@pytest.fixture
def one_rank() -> Iterator[None]:
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def groups() -> None:
    """Skip the test where no control group can be made."""
    from benchmarks.limit.limits import ControlGroup

    group = ControlGroup.make()
    if group is None:
        pytest.skip("this process may not make control groups with a memory limit")
    group.remove()


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace fsync: no file of a test has to survive a reboot."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A `ToyRun` of three steps with a checkpoint of each, of which the last two are kept."""
    from toy_run import ToyRun

    run = ToyRun(tmp_path / "run")
    run.train(3, save=True)
    return run


@pytest.fixture
def quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search shorter for plans: no worse for toy models, and faster by a second."""
    from hf_memopt.activations.planner import search

    monkeypatch.setattr(search, "_MAX_EVENTS", 100_000)


@pytest.fixture
def quick_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fewer samples for the spread and the latency."""
    from hf_memopt.lerobot.evaluate import measure

    monkeypatch.setattr(measure, "_NUM_SPREAD_SAMPLES", 2)
    monkeypatch.setattr(measure, "_NUM_LATENCY_RUNS", 1)


@pytest.fixture(scope="session")
def toy_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hf_memopt.recipes.reflow.smolvla_toy import write_vlm

    return write_vlm(tmp_path_factory.mktemp("toy") / "vlm")


@pytest.fixture(scope="session")
def toy_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 episodes of 12 frames. Read only."""
    from hf_memopt.recipes.reflow.smolvla_toy import write_dataset

    return write_dataset(tmp_path_factory.mktemp("toy") / "dataset", num_episodes=4, seed=0)


@pytest.fixture(scope="session")
def toy_teacher(toy_vlm: Path, toy_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock SmolVLA that lerobot trained and saved. Read only."""
    from lerobot_runs import train_teacher

    from hf_memopt.recipes.reflow.smolvla_toy import policy_flags

    return train_teacher(policy_flags(toy_vlm), toy_dataset, tmp_path_factory.mktemp("toy") / "teacher")


@pytest.fixture(scope="session")
def toy_student(toy_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained student of `toy_teacher`. Read only."""
    from hf_memopt.lerobot.student.prepare import prepare_student

    return prepare_student(str(toy_teacher), tmp_path_factory.mktemp("toy") / "student")


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Hide older objects from the collector, which would visit a million objects of imported libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """Reset the settings that Accelerate and logging keep for the process."""
    forget_settings()
    yield
    forget_settings()


def forget_settings() -> None:
    ours = logging.getLogger("hf_memopt")  # the recipes set its level, scripts under `launch` its handler
    ours.setLevel(logging.NOTSET)
    ours.propagate = True
    ours.handlers.clear()
    if "accelerate" in sys.modules:
        from accelerators import forget_accelerator

        forget_accelerator()
