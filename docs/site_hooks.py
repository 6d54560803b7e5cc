"""Shows mkdocs the packages as they are installed: with callbacks/ inside hf_memopt/."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    """Make build/api, links to the sources, where `mkdocstrings` looks for them."""
    package = ROOT / "build" / "api" / "hf_memopt"
    package.mkdir(parents=True, exist_ok=True)
    for source in [*(ROOT / "hf_memopt").iterdir(), ROOT / "callbacks", ROOT / "recipes"]:
        link = package / source.name
        if not source.name.startswith("__pycache__") and not link.is_symlink():
            link.symlink_to(source)
    return config
