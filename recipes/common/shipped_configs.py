"""The configuration files that come with the recipes: `recipes/configs` in a clone, inside the package elsewhere."""

from pathlib import Path

_IN_A_CLONE = Path("recipes/configs")


def configs_folder() -> Path:
    """Return the folder of the shipped files, with those for `accelerate launch` in its folder `accelerate`."""
    return Path(__file__).parents[1] / "configs"


def config_file(option: str, path: Path) -> Path:
    """Return the file, or where it does not exist the shipped one that `recipes/configs/NAME` or NAME names.

    Raises:
        ValueError: there is no such file; `option` names the flag.
    """
    name = path.relative_to(_IN_A_CLONE) if path.is_relative_to(_IN_A_CLONE) else path
    for found in (path, configs_folder() / name):
        if found.is_file():
            return found
    shipped = sorted(each.name for each in configs_folder().iterdir() if each.is_file())
    raise ValueError(f"{option}={str(path)!r}: there is no such file; name yours or one of {', '.join(shipped)}")
