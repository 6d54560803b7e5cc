"""The pages say how to install as setup.cfg does, before and after the library is on the package index."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PLUGIN = Path("plugins", "lerobot_policy_smolvla_reflow")
FILES = ("setup.cfg", "README.md", "mkdocs.yml", "CITATION.cff", "space/requirements.txt", f"{PLUGIN}/README.md")
URL = "https://example.org/memopt"


@pytest.fixture(scope="module")
def install_texts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_texts", ROOT / "docs" / "install_texts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in (*FILES, *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def switch(root: Path, url: str, on_index: str) -> None:
    lines = (root / "setup.cfg").read_text().splitlines()
    values = {"repository_url": url, "on_package_index": on_index}
    names = [line.partition(" =")[0] for line in lines]
    lines = [f"{name} = {values[name]}" if name in values else line for name, line in zip(names, lines, strict=True)]
    (root / "setup.cfg").write_text("\n".join(lines) + "\n")


def write(install_texts: ModuleType, root: Path) -> dict[str, str]:
    texts = install_texts.written(root)
    for path, text in texts.items():
        path.write_text(text)
    return {str(path.relative_to(root)): text for path, text in texts.items()}


def test_the_pages_say_it(install_texts: ModuleType) -> None:
    stale = [path.name for path, text in install_texts.written(ROOT).items() if path.read_text() != text]
    assert stale == [], "make install-texts"


def test_on_the_index(install_texts: ModuleType, copy: Path) -> None:
    before = {path: path.read_text() for path in copy.rglob("*") if path.is_file()}
    switch(copy, URL, "yes")
    texts = write(install_texts, copy)
    for name in ("README.md", "docs/index.md"):
        assert f"git clone {URL} hf_memopt" in texts[name]
        assert 'pip install "hf_memopt[' in texts[name]
    assert 'pip install "hf_memopt[peft,report]"' in texts["docs/index.md"]
    assert 'pip install "hf_memopt[lerobot]" lerobot_policy_smolvla_reflow' in texts[f"{PLUGIN}/README.md"]
    assert 'pip install "hf_memopt[trl,peft]"' in texts["docs/sft.md"]
    assert not [name for name, text in texts.items() if "<this repository>" in text or 'pip install ".' in text]
    assert texts["space/requirements.txt"] == "hf_memopt[app]\n"
    assert yaml.safe_load(texts["CITATION.cff"])["repository-code"] == URL
    assert f"\nrepo_url: {URL}\n" in texts["mkdocs.yml"]
    switch(copy, "", "no")
    write(install_texts, copy)
    changed = [path.name for path, text in before.items() if path.name != "setup.cfg" and path.read_text() != text]
    assert changed == []


def test_in_a_public_repository_alone(install_texts: ModuleType, copy: Path) -> None:
    switch(copy, URL, "no")
    texts = write(install_texts, copy)
    assert f"git clone {URL} hf_memopt" in texts["README.md"]
    assert "pip install .\n" in texts["docs/index.md"]
    assert texts["space/requirements.txt"] == f"hf_memopt[app] @ git+{URL}\n"


@pytest.mark.parametrize(
    ("url", "on_index", "message"),
    [("git@host:memopt", "no", "repository_url='git@host:memopt' in setup.cfg: give an address"), ("", "soon", "soon")],
)
def test_bad_values_are_named(install_texts: ModuleType, copy: Path, url: str, on_index: str, message: str) -> None:
    switch(copy, url, on_index)
    with pytest.raises(ValueError, match=message):
        install_texts.written(copy)


def test_a_page_without_its_block_is_named(install_texts: ModuleType, copy: Path) -> None:
    (copy / "README.md").write_text("# hf_memopt\n")
    with pytest.raises(ValueError, match=r"README\.md has 0 blocks between"):
        install_texts.written(copy)


def test_every_extra_for_users_is_listed(install_texts: ModuleType) -> None:
    extras = install_texts.read_source(ROOT).extras
    assert {"trl", "peft", "lerobot", "report"} <= set(extras)
    assert not {"dev", "docs", "all"} & set(extras)
    index = (ROOT / "docs" / "index.md").read_text()
    assert [name for name in extras if name not in index] == []
