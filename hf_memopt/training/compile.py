"""torch.compile with the knobs that it has, and the time that it takes."""

import torch
from torch import nn

from hf_memopt.ranges import COUNT


def compile_module(
    module: nn.Module, *, mode: str = "default", recompile_limit: int = 8, backend: str = "inductor"
) -> None:
    """Have calls of `module` compiled, in place: its class, its parameters' names and its state dict stay.

    Compilation takes place in the first call with a gradient, its backward in the first backward, and again for other
    shapes or settings, up to the limit.

    Args:
        module: the module to compile; a part that is called often compiles faster than a loop around it.
        mode: mode of `torch.compile`. "reduce-overhead" records CUDA graphs, which several calls before one backward
            defeat.
        recompile_limit: variants of one function that are compiled before torch runs it as it is. It is a setting of
            the whole process, `torch._dynamo.config.recompile_limit`, and no argument of `torch.compile`.
        backend: backend of `torch.compile`.

    Raises:
        ValueError: `recompile_limit` is less than 1, or torch knows no such mode.
    """
    COUNT.check("recompile_limit", recompile_limit)
    known = ["default", *torch._inductor.list_mode_options()]
    if mode not in known:
        raise ValueError(f"mode={mode!r} is unknown to torch.compile; choose from {', '.join(dict.fromkeys(known))}")
    torch._dynamo.config.recompile_limit = recompile_limit
    # Modes are settings of inductor; other backends take none.
    module.compile(backend=backend, mode=mode if backend == "inductor" else None)


def compile_seconds() -> float:
    """Return the seconds that this process has spent compiling so far, forward and backward."""
    return torch._dynamo.utils.calculate_time_spent()["total_wall_time"]
