"""Functions that modules import by name, replaced in all of them."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def patched_everywhere(name: str, plain: Any, replacement: Any, prefix: str = "") -> Iterator[None]:
    """Replace a function in all modules that have it under its name, or in those whose own names have a prefix."""
    with ExitStack() as stack:
        for path, module in list(sys.modules.items()):
            if path.startswith(prefix) and vars(module).get(name) is plain:
                stack.enter_context(patch.object(module, name, replacement))
        yield
