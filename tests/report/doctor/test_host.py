import resource
from pathlib import Path

import psutil
import pytest

from hf_memopt.report.doctor.host import host_limits
from hf_memopt.units import GIB


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/job/step", {"job/step/memory.max": "3000", "job/memory.max": "2000", "memory.max": "max"}, 2000),
        ("0::/job", {"job/memory.max": "max"}, None),
        ("0::/of/the/host", {"memory.max": "1000"}, 1000),
        ("3:cpu:/a\n4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "4096", "memory.max": "8192"}, 4096),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {}, None),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, membership: str, limits: dict[str, str], expected: int | None
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, limit in limits.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(limit + "\n")
    found = host_limits(tmp_path / "groups", tmp_path / "membership")
    assert found.cgroup_limit_gib == (None if expected is None else expected / GIB)


@pytest.mark.parametrize(("limit", "expected"), [(resource.RLIM_INFINITY, None), (8 * 2**20, 8 / 1024)])
def test_the_locked_memory_limit(monkeypatch: pytest.MonkeyPatch, limit: int, expected: float | None) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert host_limits().locked_limit_gib == expected
    assert host_limits().total_gib == psutil.virtual_memory().total / GIB
