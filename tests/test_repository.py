"""Tests of the files around the code: workflows and pages name existing targets, and links have targets."""

import ast
import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_memopt

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAGES = [*ROOT.glob("*.md"), ROOT / ".github" / "pull_request_template.md"]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


def test_called_targets_exist_and_nothing_that_ci_runs_is_left_out() -> None:
    called = {name for workflow in WORKFLOWS for step in steps_of(workflow) for name in made(step.get("run", ""))}
    called |= {name for workflow in WORKFLOWS for name in targets_of_matrices(workflow)}
    assert called <= TARGETS
    assert {"quality", "docs", "test", "test-e2e", "test-ranks", "test-fake-gpu", "test-slow", "test-gpu"} <= called
    assert {"canaries", "test-canaries", "test-latest", "wheel"} <= called
    assert made((ROOT / ".ci" / "run").read_text()) <= called


def test_actions_are_pinned_by_commit_with_their_tag() -> None:
    used = [use for file in WORKFLOWS for use in re.findall(r"uses:(.*)", file.read_text())]
    assert len(used) > 20
    assert [use for use in used if not re.fullmatch(r" [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)] == []


def test_what_may_publish_runs_in_an_environment_that_people_approve() -> None:
    for workflow in map(yaml.safe_load, (file.read_text() for file in WORKFLOWS)):
        assert workflow["permissions"] == {"contents": "read"}
        writers = [job for job in workflow["jobs"].values() if "write" in job.get("permissions", {}).values()]
        assert all(job["environment"] in ("release", "github-pages") for job in writers)


def targets_of_matrices(workflow: Path) -> set[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return {name for job in jobs for name in job.get("strategy", {}).get("matrix", {}).get("target", [])}


def made(text: str) -> set[str]:
    return set(re.findall(r"^make ([a-z0-9-]+)", text, re.MULTILINE))


def test_contributors_and_the_readme_name_targets_that_exist() -> None:
    quoted = re.compile(r"`make ([a-z0-9-]+)|^make ([a-z0-9-]+)(?= {2,}|$)", re.MULTILINE)
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


def test_no_page_claims_that_the_package_is_on_the_index_before_it_is() -> None:
    given = configparser.ConfigParser()
    given.read(ROOT / "setup.cfg")
    if given["tool:hf_memopt"].getboolean("on_package_index"):
        pytest.skip("it is there")
    pages = [*PAGES, *(ROOT / "docs").rglob("*.md")]
    claims = [page.name for page in pages if re.search(r"pip install [\"']?hf[_-]memopt", page.read_text())]
    assert set(claims) <= {"CONTRIBUTING.md", "LOG.md", "decisions.md"}  # these pages say that no page has the command


def test_the_readme_names_scripts_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for script in re.findall(r"python (recipes/\S+\.py)", text):
        ast.parse((ROOT / script).read_text())
    for module in re.findall(r"python -m (benchmarks\.[\w.]+)", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists()
