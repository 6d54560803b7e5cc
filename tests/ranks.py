"""Runs of a function in two or more processes that communicate on the CPU."""

import functools
import os
import socket
import subprocess
import sys
from typing import Any

from fork_server import TESTS, Call, Ended, ForkServer, called
from patience import HANG_S

PRELOADED = ("torch", "torch.distributed.fsdp", "accelerate", "transformers.trainer", "safetensors.torch", "hf_memopt")


def on_ranks(function: str, *arguments: Any, num_ranks: int = 2, **environ: str) -> list[Any]:
    """Return a function's results on each rank; arguments as for `ends_of_ranks`."""
    ends = ends_of_ranks(function, *arguments, num_ranks=num_ranks, **environ)
    failed = [f"rank {rank}: status {end.status}\n{end.output}" for rank, end in enumerate(ends) if end.status]
    assert not failed, "\n".join(failed)[-6000:]
    return [end.returned for end in ends]


def ends_of_ranks(function: str, *arguments: Any, num_ranks: int = 2, **environ: str) -> list[Ended]:
    """Call `"module:name"` on each rank with values that JSON can hold; the first that fails ends the others.

    The module lies beside the test or in `tests/`. Ranks have as many threads as this process, since results are
    compared bit by bit.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",  # tells Lightning that the ranks are started already
        **environ,
    }
    ranks = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    return _server().run([Call("ranks:_on_this_rank", (function, *arguments), of_rank) for of_rank in ranks])


def _on_this_rank(function: str, *arguments: Any) -> Any:
    import torch.distributed

    returned = called(function, *arguments)
    # A rank that has ended would make a rank that still communicates with it abort.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return returned


@functools.cache
def _server() -> ForkServer:
    return ForkServer(PRELOADED, {**os.environ, "ACCELERATE_USE_CPU": "true"})


def torchrun(*command: str) -> str:
    """Run a script, or a module behind `-m`, in two processes, and return their errors; tests can be imported."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [*launch, *command],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths},
    )
    assert result.returncode == 0, result.stderr[-6000:]
    return result.stderr
