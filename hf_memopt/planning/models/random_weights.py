"""Models of random weights where a program loads trained ones."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import transformers  # Its parts are slow to import, and are when they are named.

from hf_memopt.planning.models.hub_code import check_code, no_hub_kernels


def weights_from_config(kind: Any) -> AbstractContextManager[Any]:
    """Make transformers' auto class build models from their configurations inside; no weights are loaded."""

    def from_config(name: str, *, dtype: Any = None, torch_dtype: Any = None, **ignored: Any) -> Any:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        check_code(config, f"model={name!r}")
        with no_hub_kernels():
            return kind.from_config(config, dtype=dtype or torch_dtype, trust_remote_code=False)

    return patch.object(kind, "from_pretrained", from_config)
