"""Processes on the fake CUDA runtime."""

import functools
import os
import sys
from pathlib import Path

from fork_server import Call, Ended, ForkServer

from fake_cuda.build import built
from fake_cuda.device import LIBRARIES

TESTS = Path(__file__).parent.parent

PRELOADED = ("benchmarks.blind", "pytest", "accelerate", "transformers.trainer", "hf_memopt")


def environment(**settings: object) -> dict[str, str]:
    """Return a child's environment, in which `seed=3` of `runtime/runtime.hpp` is FAKE_CUDA_SEED=3."""
    libraries = built()
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **{f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()},
        LIBRARIES: str(libraries),
        "LD_PRELOAD": f"{libraries / 'libcudart.so.13'}:{libraries / 'libcuda.so.1'}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_MODULE_LOADING": "LAZY",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_JIT": "0",  # scripted functions would become GPU code
    }


def run_pytest(arguments: list[str], **settings: object) -> Ended:
    """Return exit code, output and errors of a process forked, per settings, from a server that has imported torch."""
    plugins = ["-p", "fake_cuda.plugin", "-p", "no:cacheprovider"]
    # Libraries have already imported some plugins of pytest, so their assertions are not rewritten.
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    (ended,) = _server(**settings).run([Call("pytest:main", [[*plugins, *quiet, *arguments]])])
    return ended


@functools.cache
def _server(**settings: object) -> ForkServer:
    return ForkServer(PRELOADED, environment(**settings))


def main() -> None:
    """Run a Python program on the fake runtime: `python -m fake_cuda.launch SCRIPT [ARGUMENTS]`."""
    install = "import os, sys, runpy; from fake_cuda import device; device.install_operators(); "
    folder = "sys.argv = sys.argv[1:]; sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0]))); "
    program = folder + "runpy.run_path(sys.argv[0], run_name='__main__')"
    os.execve(sys.executable, [sys.executable, "-c", install + program, *sys.argv[1:]], environment())


if __name__ == "__main__":
    main()
