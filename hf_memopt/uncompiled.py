"""Code that torch.compile leaves to Python.

Dynamo compiles every Python function called while compiled code runs: an offloader's hooks as well, where a module was
compiled in place (`module.compile()`), or a context is entered inside of a compiled function. Functions are marked by
the seam that Dynamo itself uses to skip code, which costs nothing per call and does not import Dynamo.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy


def uncompiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Run a function, and all that it calls, without compilation."""
    assert isinstance(function, FunctionType)
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def graph_break[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Make compiled code call a function instead of tracing it; where a context is entered, compilation ends."""
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "offloading runs as it is"
    return function
