"""Robot policies of lerobot, told from transformers models without lerobot."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

_RUN, _POLICY = "train_config.json", "config.json"


class PolicyFile(NamedTuple):
    """A file that lerobot wrote.

    Attributes:
        kind: lerobot's name of the policy's type.
        is_run: it describes a run, as `train_config.json` does, and not the policy alone.
    """

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
    config = _downloaded(model, _POLICY)
    return config and (_downloaded(model, _RUN) or config)


def _read(path: Path) -> PolicyFile | None:
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        held: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # transformers says where it is wrong
    if not isinstance(held, dict) or "model_type" in held:
        return None
    is_run = isinstance(held.get("policy"), dict)
    kind = (held["policy"] if is_run else held).get("type")
    is_named_so = is_run or path.name == _POLICY
    return PolicyFile(path, kind, is_run) if isinstance(kind, str) and is_named_so else None


def _downloaded(model: str, name: str) -> PolicyFile | None:
    try:
        return _read(Path(hf_hub_download(model, name)))
    except (HfHubHTTPError, EntryNotFoundError, HFValidationError):
        return None  # transformers says that nothing was found
