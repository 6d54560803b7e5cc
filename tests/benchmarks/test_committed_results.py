import json
import re
from pathlib import Path

import pytest
from benchmark_runs import Load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = ("benchmarks.md", "choosing.md", "memory_limit.md", "streamed_weights.md", "trainer.md", "who_is_exact.md")
DOCUMENTATION = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
# Those that are named there, since a run of benchmarks leaves more files in this checkout.
RESULTS = re.findall(r"`([\w-]+\.json)`", DOCUMENTATION)


@pytest.mark.parametrize("file", RESULTS)
def test_documentation_quotes_the_committed_results(file: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    load(results["benchmark"]).print_report(results)
    assert capsys.readouterr().out.strip() in DOCUMENTATION


def test_the_readme_quotes_committed_figures() -> None:
    (name,) = re.findall(r"benchmarks/results/(memory-over-a-step-[\w-]+\.json)", README)
    found = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["techniques"]
    for technique in ("plain", "within a budget"):
        row = found[technique]
        quoted = f"{row['measured_peak_bytes'] / 2**20:.1f} MiB ({row['predicted_peak_bytes'] / 2**20:.1f})"
        assert quoted in README


def test_the_readme_is_short_and_its_script_is_one_of_the_recipes() -> None:
    assert len(README.splitlines()) <= 95
    (block,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert block == (ROOT / "recipes" / "by_feature" / "offload_budget.py").read_text()
