"""The build of the fake CUDA runtime into a cache folder, by a C++ compiler with headers from the wheels of torch."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "runtime"
DRIVER = SOURCES / "driver.cpp"
OPERATORS = sorted(SOURCES.glob("operators/*.cpp"))
RUNTIME = sorted(set(SOURCES.rglob("*.cpp")) - {DRIVER, *OPERATORS})
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-pthread"]

Compiler = list[str]


class CannotBuildError(Exception):
    """Raised with the reason."""


def built() -> Path:
    """Return the folder of `libcudart.so.13`, `libcuda.so.1` and `liboperators.so`; a build takes a minute."""
    if platform.system() != "Linux":
        raise CannotBuildError(f"the fake CUDA runtime needs Linux, this is {platform.system()}")
    compiler = _compiler()
    folder = _cache() / _key(compiler)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first process builds, the others wait
        if not folder.is_dir():
            _build_into(folder, compiler)
    return folder


def _compiler() -> Compiler:
    """Return `CXX`, g++ or clang++, which has to use libstdc++, as torch does."""
    for name in [os.environ.get("CXX", ""), "g++", "clang++"]:
        if name and shutil.which(name):
            return [name]
    raise CannotBuildError("the fake CUDA runtime needs g++ or clang++ with libstdc++ (Debian, Ubuntu: g++)")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_memopt" / "fake_cuda"


def _key(compiler: Compiler) -> str:
    import torch

    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(f"{version} {torch.__version__} {torch.__path__} {FLAGS}".encode())
    for path in [*sorted(SOURCES.rglob("*.?pp")), Path(__file__)]:
        digest.update(f"{path.relative_to(SOURCES.parent)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _build_into(folder: Path, compiler: Compiler) -> None:
    """Build in a draft folder, which gets the folder's name when complete."""
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    _build(draft, compiler)
    draft.rename(folder)


def _build(folder: Path, compiler: Compiler) -> None:
    cuda = _cuda_headers()
    torch_headers, torch_libraries = _torch_folders()
    with ThreadPoolExecutor(2) as pool:
        includes = {source: [*cuda, *torch_headers] for source in OPERATORS} | dict.fromkeys([*RUNTIME, DRIVER], cuda)
        for task in [pool.submit(_compile, compiler, source, folder, paths) for source, paths in includes.items()]:
            task.result()

    # torch looks up each function under a version with the library's name.
    versions = folder / "versions.map"
    versions.write_text("libcudart.so.13 { global: *; };\n")
    _link(compiler, "libcudart.so.13", RUNTIME, folder, [f"-Wl,--version-script={versions}"])
    runtime = [f"-L{folder}", "-l:libcudart.so.13"]
    _link(compiler, "libcuda.so.1", [DRIVER], folder, runtime)
    libraries = ["-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"]
    _link(compiler, "liboperators.so", OPERATORS, folder, [*runtime, f"-L{torch_libraries}", *libraries])
    for leftover in [*folder.glob("*.o"), versions]:
        leftover.unlink()


def _compile(compiler: Compiler, source: Path, folder: Path, includes: list[str]) -> None:
    options = [*FLAGS, f"-I{SOURCES}", *includes]
    _run([*compiler, "-c", *options, str(source), "-o", str(_object(source, folder))])


def _object(source: Path, folder: Path) -> Path:
    return folder / "-".join(source.relative_to(SOURCES).with_suffix(".o").parts)


def _link(compiler: Compiler, library: str, sources: list[Path], folder: Path, options: list[str]) -> None:
    objects = [str(_object(source, folder)) for source in sources]
    # Symbols that only torch's own libraries define are found when those are loaded.
    _run([*compiler, "-shared", *FLAGS, *objects, f"-Wl,-soname,{library}", *options, "-o", str(folder / library)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def _cuda_headers() -> list[str]:
    """Return options for the CUDA wheel's headers, and for Triton's copy of those missing there."""
    packages = Path(sysconfig.get_path("purelib"))
    folders = [packages / "nvidia/cu13/include", packages / "triton/backends/nvidia/include"]
    for folder in folders:
        if not folder.is_dir():
            raise CannotBuildError(f"the fake CUDA runtime needs torch for CUDA 13, whose wheels bring {folder}")
    return [f"-I{folder}" for folder in folders]


def _torch_folders() -> tuple[list[str], Path]:
    """Return options for torch's headers, and the folder of its libraries."""
    import torch

    folder = Path(torch.__path__[0])
    headers = [folder / "include", folder / "include/torch/csrc/api/include"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [abi, *(f"-isystem{path}" for path in headers)], folder / "lib"


if __name__ == "__main__":
    print(built())
