"""The model hub: its files, and whether it answers, since huggingface_hub tries half a minute for each file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import constants, get_session, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from hf_memopt.planning.simulation.patched_hub import offline
from hf_memopt.text_files import read_values

# For a connection alone; a hub that is slow to answer has huggingface_hub's own time, HF_HUB_ETAG_TIMEOUT.
_CONNECT_S = 3.0
# One of them tells what a model is.
_FILES = ("config.json", "model_index.json")


@contextmanager
def offline_if_unreachable(model: str | None) -> Iterator[None]:
    """Make huggingface_hub and transformers read their cache alone inside, where the hub does not answer one request.

    Cost: one request, up to 3 seconds for its connection and up to `HF_HUB_ETAG_TIMEOUT` (10 seconds) for its answer.

    Raises:
        ValueError: the hub does not answer, and `model` is a hub id that was not downloaded before.
    """
    if constants.HF_HUB_OFFLINE or _answers():
        yield
        return
    if model is not None:
        _check_downloaded(model)
    with offline():
        yield


def downloaded(model: str, name: str) -> Path | None:
    """Return the path of a file from the hub, or None if the repository lacks it or cannot be reached."""
    try:
        return Path(hf_hub_download(model, name))
    except (OSError, ValueError):
        return None


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file cannot be read or holds something else."""
    try:
        values = read_values(path)
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _answers() -> bool:
    timeout = httpx.Timeout(constants.HF_HUB_ETAG_TIMEOUT, connect=_CONNECT_S)
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout, follow_redirects=False)
    except httpx.TransportError:
        return False
    return True


def _check_downloaded(model: str) -> None:
    """Refuse a hub id before torch is imported for it; other names, such as misspelt folders, are looked at later."""
    if Path(model).parent.is_dir():
        return
    try:
        found = [try_to_load_from_cache(model, name) for name in _FILES]
    except HFValidationError:
        return
    if not any(isinstance(each, str) for each in found):
        raise ValueError(
            f"model={model!r}: no configuration was found; pass a folder with a config.json, such a file, or a hub id "
            f"that was downloaded before, since {constants.ENDPOINT} cannot be reached"
        )
