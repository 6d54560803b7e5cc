"""What surrounds the code: workflows and pages name targets and scripts that exist, links lead somewhere."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_memopt

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAGES = [*ROOT.glob("*.md"), ROOT / ".github" / "pull_request_template.md"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


def test_called_targets_exist_and_nothing_that_ci_runs_is_left_out() -> None:
    called = {name for workflow in WORKFLOWS for step in steps_of(workflow) for name in made(step.get("run", ""))}
    assert called <= TARGETS
    assert {"quality", "docs", "test", "test-fake-gpu", "test-slow", "test-gpu", "wheel"} <= called
    assert {"canaries", "test-latest"} <= called
    assert made((ROOT / ".ci" / "run").read_text()) <= called


def made(text: str) -> set[str]:
    return set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))


def test_contributors_and_the_readme_name_targets_that_exist() -> None:
    quoted = re.compile(r"`make ([a-z-]+)|^make ([a-z-]+)(?= {2,}|$)", re.MULTILINE)
    named = {name for page in PAGES for found in quoted.findall(page.read_text()) for name in found if name}
    assert {"setup", "test", "docs"} <= named <= TARGETS


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == hf_memopt.__version__
    assert f"\n## {hf_memopt.__version__} ({citation['date-released']})\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_no_page_claims_that_the_package_is_on_the_index() -> None:
    pages = [*PAGES, *(ROOT / "docs").rglob("*.md")]
    claims = [page.name for page in pages if re.search(r"pip install [\"']?hf[_-]memopt", page.read_text())]
    assert set(claims) <= {"CONTRIBUTING.md", "LOG.md", "decisions.md"}  # which say that no page does


def test_the_readme_names_scripts_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for script in re.findall(r"python (recipes/\S+\.py)", text):
        ast.parse((ROOT / script).read_text())
    for module in re.findall(r"python -m (benchmarks\.[\w.]+)", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists()
