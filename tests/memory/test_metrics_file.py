from pathlib import Path

import pytest

from hf_memopt.memory.logger import METRICS_FILE, append_metrics, read_metrics
from hf_memopt.report import read_run


def test_metrics_come_back_with_the_later_of_two_lines_for_a_step(tmp_path: Path) -> None:
    file = tmp_path / "run" / METRICS_FILE
    for step, figure in ((1, 0.5), (2, 0.75), (3, 9.0), (2, 0.25)):
        append_metrics(file, step, {"memory/host_rss_gib": figure})
    found = [(record["step"], record["memory/host_rss_gib"]) for record in read_metrics(file)]
    assert found == [(1, 0.5), (2, 0.25), (3, 9.0)]
    with pytest.raises(ValueError, match="metrics have a key 'step'"):
        append_metrics(file, 4, {"step": 4})


@pytest.mark.parametrize("line", ['{"step": 2, "memory/al', '{"loss": 1.0}', "[1]", '{"step": null}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    append_metrics(tmp_path / METRICS_FILE, 1, {})
    with (tmp_path / METRICS_FILE).open("a") as lines:
        lines.write(line)
    with pytest.raises(ValueError, match=rf"{METRICS_FILE}, line 2, is not a JSON object with a 'step'"):
        read_run(tmp_path)
