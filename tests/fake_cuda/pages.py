"""Host memory that tests register with the fake CUDA runtime, unmap, and forget."""

import ctypes
import mmap

import torch

SIZE = 1 << 20
SUCCESS = 0


def runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.13")


class Pages(mmap.mmap):
    """Anonymous memory with its address, and a view of it as a tensor of bytes."""

    def __new__(cls, size: int = SIZE) -> "Pages":
        return super().__new__(cls, -1, size)

    @property
    def address(self) -> int:
        view = ctypes.c_char.from_buffer(self)
        return ctypes.addressof(view)

    def tensor(self) -> torch.Tensor:
        """Return a tensor that does not keep the pages alive."""
        return torch.frombuffer((ctypes.c_ubyte * len(self)).from_address(self.address), dtype=torch.uint8)


def register(pages: Pages) -> None:
    assert runtime().cudaHostRegister(ctypes.c_void_p(pages.address), ctypes.c_size_t(len(pages)), 0) == SUCCESS


def unregister(address: int) -> int:
    return runtime().cudaHostUnregister(ctypes.c_void_p(address))
