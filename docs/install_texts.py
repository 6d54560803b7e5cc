"""Write how to install into the pages, as `[tool:hf_memopt]` of setup.cfg says: `make install-texts`.

The address of the repository goes into the metadata of the site, of the citation and of the Space, too. setup.py reads
it for that of the package.
"""

import configparser
import re
from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- install: written by make install-texts -->", "<!-- /install -->"
PLUGIN = "lerobot_policy_smolvla_reflow"
FOR_MAINTAINERS = {"dev", "docs", "all"}


@dataclass(frozen=True)
class Source:
    """The places that have the library; `url` is empty until the repository is public."""

    url: str
    on_index: bool
    extras: tuple[str, ...]

    @property
    def package(self) -> str:
        return "hf_memopt" if self.on_index else "."

    @property
    def plugin(self) -> str:
        return PLUGIN if self.on_index else f"./plugins/{PLUGIN}"

    @property
    def clone(self) -> str:
        return f"git clone {self.url or '<this repository>'} hf_memopt && cd hf_memopt"


def read_source(root: Path) -> Source:
    given = configparser.ConfigParser()
    given.read(root / "setup.cfg")
    section = given["tool:hf_memopt"]
    url = section["repository_url"]
    if url and not re.fullmatch(r"https://\S+", url):
        raise ValueError(f"repository_url={url!r} in setup.cfg: give an address that begins with https://, or none")
    extras = tuple(name for name in given["options.extras_require"] if name not in FOR_MAINTAINERS)
    return Source(url, section.getboolean("on_package_index"), extras)


def written(root: Path) -> dict[Path, str]:
    """Return the text that each file should have, from its present text and `setup.cfg`."""
    source = read_source(root)
    texts = {path: path.read_text(encoding="utf-8") for path in _pages(root)}
    for path, block in {root / "README.md": _readme(source), root / "docs" / "index.md": _index(source)}.items():
        texts[path] = _with_block(path, texts[path], block)
    texts = {path: _with_names(text, source) for path, text in texts.items()}
    for name, key, after in (("mkdocs.yml", "repo_url", "site_name"), ("CITATION.cff", "repository-code", "license")):
        texts[root / name] = _with_line((root / name).read_text(encoding="utf-8"), key, source.url, after)
    at = f" @ git+{source.url}" if source.url and not source.on_index else ""
    texts[root / "space" / "requirements.txt"] = f"hf_memopt[app]{at}\n"
    return texts


def _pages(root: Path) -> list[Path]:
    # The log tells history.
    docs = [page for page in sorted((root / "docs").glob("*.md")) if page.name != "LOG.md"]
    return [root / "README.md", root / "plugins" / PLUGIN / "README.md", *docs]


def _readme(source: Source) -> str:
    package = f'pip install "{source.package}[peft,report]"'.ljust(39)
    package += "# Python 3.12 or newer; peft for LoRA, report for pages of runs"
    pinned = "make setup && . .venv/bin/activate     # "
    if source.on_index:
        return f"""\
```bash
{package}
{source.clone}
{pinned}tests, demos and benchmarks, with pinned packages in .venv
```"""
    return f"""\
```bash
{source.clone}
{package}
{pinned}or, in place of pip, everything with pinned packages in .venv
```"""


def _index(source: Source) -> str:
    place = (
        "on the package index" if source.on_index else "not on the package index yet; install it from its repository"
    )
    first, last = ("", f"{source.clone}\n") if source.on_index else (f"{source.clone}\n", "")
    return f"""\
The package is {place}. It needs Python 3.12 or newer.

```bash
{first}# Into your environment: torch 2.11 or newer, transformers, accelerate, datasets.
pip install {source.package}
# With an extra, or several:
{_lines(source.extras)}
pip install "{source.package}[peft,report]"
# With SmolVLA, found by lerobot's commands.
pip install "{source.package}[lerobot]" {source.plugin}
# Or everything, pinned, in .venv.
{last}make setup && . .venv/bin/activate
```"""


def _lines(extras: tuple[str, ...]) -> str:
    """Return the names as comments of at most 100 characters."""
    lines = ["#"]
    for name in extras:
        word = f" {name}{'.' if name == extras[-1] else ','}"
        if len(lines[-1] + word) > 100:
            lines.append("#")
        lines[-1] += word
    return "\n".join(lines)


def _with_block(path: Path, text: str, block: str) -> str:
    marked = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    text, count = marked.subn(lambda found: f"{block}\n", text)
    if count != 1:
        raise ValueError(f"{path} has {count} blocks between {BEGIN} and {END}; it needs one")
    return text


def _with_names(text: str, source: Source) -> str:
    """Return a page whose commands install from the index, or from the clone."""
    text = re.sub(r'pip install "(?:\.|hf_memopt)\[', f'pip install "{source.package}[', text)
    return re.sub(rf'(pip install (?:"\S+" )?)(?:\./plugins/)?{PLUGIN}', rf"\g<1>{source.plugin}", text)


def _with_line(text: str, key: str, value: str, after: str) -> str:
    """Return YAML with the line `key: value` below that of `after`, or without it if there is no value."""
    text = re.sub(rf"^{key}:.*\n", "", text, flags=re.MULTILINE)
    line = f"{key}: {value}\n" if value else ""
    return re.sub(rf"^{after}:.*\n", lambda found: found.group() + line, text, count=1, flags=re.MULTILINE)


def main() -> None:
    for path, text in written(Path(__file__).parents[1]).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
