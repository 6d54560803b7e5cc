"""Tests that the site's front page says the same as the README up to the code, and that both say how to install."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FRONT_PAGE = (ROOT / "docs" / "index.md").read_text()
INSTALL = re.compile(
    r"^<!-- install: written by make install-texts -->\n(.*?)^<!-- /install -->$", re.MULTILINE | re.DOTALL
)


def up_to_the_code(page: str) -> str:
    """Return the text before the Python code, without the installation, with links as the site has them."""
    text = re.split(r"^## (?:Paste this|In your code)$", page, flags=re.MULTILINE)[0]
    return INSTALL.sub("", text).replace("](docs/", "](")


def test_the_front_page_is_the_readme_up_to_the_code() -> None:
    assert "## Four questions" in up_to_the_code(README)
    assert "## You have … → do this" in up_to_the_code(README)
    assert up_to_the_code(FRONT_PAGE) == up_to_the_code(README)


def test_each_says_once_how_to_install() -> None:
    for page in (README, FRONT_PAGE):
        (block,) = INSTALL.findall(page)
        assert len(re.findall(r"```bash\n[^`]+```\n", block)) == 1
