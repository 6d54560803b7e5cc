"""What `make demo-metaworld` found is kept with where it was found."""

import json
from pathlib import Path

import pytest
from benchmark_runs import loaded_benchmarks


def test_results_are_kept_with_hardware_and_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    success = {"all": {"successes": 9, "episodes": 10}}
    policy = {"title": "teacher, 1 step", "success": success, "latency_ms": 1.0, "error": 0.0}
    found = {"settings": {"seed": 0}, "policies": {"teacher_1": policy}, "mean_action": success}
    (tmp_path / "results.json").write_text(json.dumps(found))
    with loaded_benchmarks() as load:
        metaworld = load("metaworld")
        monkeypatch.setattr(metaworld, "version", lambda name: f"of {name}")
        arguments = ["--demo", str(tmp_path), "--output", str(tmp_path / "kept.json")]
        assert metaworld.main(arguments) == 0
        assert "remark" not in json.loads((tmp_path / "kept.json").read_text())
        assert metaworld.main([*arguments, "--remark=busy"]) == 0
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["remark"] == "busy"
    assert {"hardware", "versions", "commit", "date", *found} <= kept.keys()
    assert kept["versions"]["mujoco"] == "of mujoco"
    assert "90% (60% to 98%)" in capsys.readouterr().out
