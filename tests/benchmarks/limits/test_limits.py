import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmark_runs import environ_of_processes

from benchmarks.limit import limits
from benchmarks.limit.limited_process import LimitedRun, run_limited
from benchmarks.limit.limits import ControlGroup, memory_limit
from hf_memopt.units import MIB

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a single process")

# Each step takes the same anonymous memory again; glibc gives so large a block back when it is freed.
ALLOCATES = """
import sys
from benchmarks.limit.reported_steps import report_steps
num_bytes, pipe = int(sys.argv[1]), int(sys.argv[2].partition("=")[2])
sys.exit(report_steps(lambda: float(len(bytearray(num_bytes))), 3, pipe, lambda: {"answer": 42}))
"""


@pytest.fixture(autouse=True)
def _benchmarks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environ_of_processes()["PYTHONPATH"])


@pytest.fixture(params=["group", "data"])
def limit_kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    if kind == "group":
        request.getfixturevalue("groups")
    return kind


def run(kind: str, num_bytes: int, allowance: int | None, log: Path) -> LimitedRun:
    command = [sys.executable, "-c", ALLOCATES, str(num_bytes)]
    with memory_limit(kind) as limit:
        free = run_limited(command, limit, None, log=log)
    assert free.end == "finished"
    if allowance is None:
        return free
    with memory_limit(kind) as limit:
        return run_limited(command, limit, free.counted_rest(limit) + allowance, log=log)


@linux
def test_a_process_below_its_limit_finishes(limit_kind: str, tmp_path: Path) -> None:
    found = run(limit_kind, 64 * MIB, 96 * MIB, tmp_path / "log")
    assert (found.end, found.reason) == ("finished", None)
    assert found.losses == [64.0 * MIB] * 3
    assert found.results["answer"] == 42


@linux
def test_a_process_past_its_limit_ends_in_the_step_that_passes_it(limit_kind: str, tmp_path: Path) -> None:
    found = run(limit_kind, 160 * MIB, 96 * MIB, tmp_path / "log")
    if limit_kind == "group":
        assert (found.end, found.reason) == ("killed", "out of memory")
    else:
        assert (found.end, found.reason) == ("raised", "MemoryError: ")
    assert found.losses == []
    assert found.peak_bytes - found.rest.anonymous_bytes <= 96 * MIB


@linux
def test_peaks_are_those_of_the_steps(tmp_path: Path) -> None:
    found = run("data", 256 * MIB, None, tmp_path / "log")
    assert found.peak_bytes - found.rest.anonymous_bytes == pytest.approx(256 * MIB, rel=0.05)
    assert [sample.at_s for sample in found.samples] == sorted(sample.at_s for sample in found.samples)


@linux
@pytest.mark.usefixtures("groups")
def test_a_limit_below_the_present_use_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ALLOCATES, "1"]
    with memory_limit("group") as limit, pytest.raises(ValueError, match=r"num_bytes=1048576: .* allow more"):
        run_limited(command, limit, MIB, log=tmp_path / "log")


@linux
@pytest.mark.usefixtures("groups")
def test_no_group_stays(tmp_path: Path) -> None:
    with memory_limit("group") as limit:
        assert isinstance(limit, ControlGroup)
        folder = limit.folder
        run_limited([sys.executable, "-c", ALLOCATES, "1"], limit, None, log=tmp_path / "log")
        assert folder.exists()
    assert not folder.exists()


@linux
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise RuntimeError('unrelated')", "status 1.*(?s:.*)unrelated"),
        ("import os; os.abort()", "status -6"),
        (
            "from benchmarks.limit.reported_steps import report_steps\n"
            "report_steps(lambda: 1 / 0, 1, int(__import__('sys').argv[1].partition('=')[2]), dict)",
            "ZeroDivisionError",
        ),
    ],
)
def test_a_failure_that_is_not_about_memory_is_an_error(code: str, told: str, tmp_path: Path) -> None:
    with memory_limit("data") as limit, pytest.raises(RuntimeError, match=told):
        run_limited([sys.executable, "-c", code], limit, 2**33, log=tmp_path / "log")


@linux
def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from benchmarks.limit.reported_steps import report_steps\n"
        "report_steps(lambda: time.sleep(600), 1, int(__import__('sys').argv[1].partition('=')[2]), dict)"
    )
    with memory_limit("data") as limit:
        found = run_limited([sys.executable, "-c", code], limit, None, log=tmp_path / "log", timeout_s=0.5)
    assert (found.end, found.steps) == ("too slow", [])


def test_other_systems_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="only Linux limits the memory of a single process, and this is darwin"):
        with memory_limit():
            pass


class Kernel:
    """Folders that look like control groups: the kernel makes their files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.files = root, dict[Path, dict[str, str]]()
        mkdir: Callable[..., None] = Path.mkdir

        def make(folder: Path, *arguments: object, **options: object) -> None:
            mkdir(folder, *arguments, **options)
            for name, text in self.files.get(folder.parent, {}).items():
                (folder / name).write_text(text)

        monkeypatch.setattr(Path, "mkdir", make)

    def group(self, path: str, files_of_children: dict[str, str]) -> Path:
        folder = self.root / path
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").touch()
        self.files[folder] = files_of_children
        return folder


V1 = {
    "memory.limit_in_bytes": "9",
    "memory.memsw.limit_in_bytes": "9",
    "memory.oom_control": "under_oom 0\noom_kill 3\n",
}
V2 = {"memory.max": "max", "memory.swap.max": "max", "memory.events": "oom 1\noom_kill 3\n"}


def test_version_1_limits_memory_and_swap_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Kernel(tmp_path, monkeypatch).group("memory/jobs/mine", V1)
    (tmp_path / "membership").write_text("5:cpu,cpuacct:/jobs/mine\n4:memory:/jobs/mine\n0::/\n")
    group = ControlGroup.make(tmp_path, tmp_path / "membership")
    assert group is not None
    assert group.folder.parent == own
    group.set(1, 4096)
    assert (group.folder / "memory.limit_in_bytes").read_text() == "4096"
    assert (group.folder / "memory.memsw.limit_in_bytes").read_text() == "4096"
    assert group.num_kills() == 3
    assert group.command(["python", "x"])[-3:] == [str(group.folder / "cgroup.procs"), "python", "x"]


@pytest.mark.parametrize("has_limits", ["own", "parent"])
def test_version_2_has_no_swap_and_may_need_a_sibling(
    has_limits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(tmp_path, monkeypatch)
    folders = {"parent": kernel.group("user/app", {}), "own": kernel.group("user/app/shell", {})}
    kernel.files[folders[has_limits]] = V2
    (tmp_path / "membership").write_text("0::/user/app/shell\n")
    group = ControlGroup.make(tmp_path, tmp_path / "membership")
    assert group is not None
    assert group.folder.parent == folders[has_limits]
    group.set(1, 4096)
    assert (group.folder / "memory.max").read_text() == "4096"
    assert (group.folder / "memory.swap.max").read_text() == "0"


def test_without_the_controller_there_is_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Kernel(tmp_path, monkeypatch).group("shell", {})
    (tmp_path / "membership").write_text("0::/shell\n")
    assert ControlGroup.make(tmp_path, tmp_path / "membership") is None
    assert [path.name for path in own.iterdir()] == ["cgroup.procs"]


@linux
def test_auto_takes_the_group_where_one_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.ControlGroup, "make", lambda: None)
    with memory_limit() as limit:
        assert limit.name == "RLIMIT_DATA"
    with pytest.raises(OSError, match="limit='group': this process may not"):
        with memory_limit("group"):
            pass
