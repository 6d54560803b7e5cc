"""Robot policies of lerobot, told from transformers models without lerobot."""

from pathlib import Path
from typing import NamedTuple

from hf_memopt.planning.models.hub import downloaded, read_object

_RUN, _POLICY = "train_config.json", "config.json"


class PolicyFile(NamedTuple):
    """A file that lerobot wrote; `is_run`: it describes a run, as `train_config.json` does, and not a policy alone."""

    path: Path
    kind: str
    is_run: bool


def policy_file(model: str) -> PolicyFile | None:
    """Return the run, or else the policy, that a file, a folder or a hub id means; None, it is not lerobot's."""
    path = Path(model).expanduser()
    if path.is_file():
        return _read(path)
    if path.is_dir():
        return _read(path / _RUN) or _read(path / _POLICY)
    if path.parent != Path() and path.parent.exists():
        return None  # a misspelt path
    config = _read(downloaded(model, _POLICY))
    return config and (_read(downloaded(model, _RUN)) or config)


def _read(path: Path | None) -> PolicyFile | None:
    """Return None for a file that is missing or wrong, too: transformers says so."""
    if path is None or path.suffix != ".json":
        return None
    held = read_object(path)
    if held is None or "model_type" in held:
        return None
    is_run = isinstance(held.get("policy"), dict)
    kind = (held["policy"] if is_run else held).get("type")
    is_policy = isinstance(kind, str) and (is_run or path.name == _POLICY)
    return PolicyFile(path, str(kind), is_run) if is_policy or path.name == _RUN else None
