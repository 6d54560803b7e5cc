"""The model hub, asked once whether it answers: huggingface_hub tries for half a minute, again for each file."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import httpx
from huggingface_hub import constants
from huggingface_hub.utils import get_session

# For a connection alone; a hub that is slow to answer has huggingface_hub's own time, HF_HUB_ETAG_TIMEOUT.
_CONNECT_S = 3.0


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Have huggingface_hub and transformers read their cache alone inside, where the hub does not answer one request.

    Cost: one request, up to 3 seconds for its connection and up to `HF_HUB_ETAG_TIMEOUT` (10 seconds) for its answer.
    """
    with patch.object(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or not _answers()):
        yield


def _answers() -> bool:
    timeout = httpx.Timeout(constants.HF_HUB_ETAG_TIMEOUT, connect=_CONNECT_S)
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout, follow_redirects=False)
    except httpx.TransportError:
        return False
    return True
