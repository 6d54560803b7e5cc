"""An accelerator without hardware: fake tensors on a device that follows CUDA's rules.

Fake tensors on "cuda" need a driver (backward fails without one, autocast switches itself off, attention takes the math
path), and fake tensors on "cpu" follow the CPU's rules. torch's PrivateUse1 Python backend is an accelerator to the
autograd engine, to the optimizers and to operators that have one path for accelerators and one for the CPU; what
remains is given to it here. Registering it is for a process and for good, so a simulation has a process of its own.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # as the first operation on fake tensors would do, in every forked process: a second each
import torch.optim.optimizer as torch_optimizer
import torch.utils._foreach_utils as foreach_utils
import torch.utils.backend_registration as backend_registration
import transformers.utils.import_utils as seam
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _pop_mode_temporarily

from hf_memopt.estimate.gpus import DEFAULT_CARD
from hf_memopt.estimate.simulation import attention, autocast
from hf_memopt.estimate.simulation.data_dependent import Unknowns
from hf_memopt.estimate.simulation.frozen_weights import as_seen_by, replace_memory, weights_come_and_go
from hf_memopt.estimate.simulation.virtual_time import VirtualClock, VirtualCopier
from hf_memopt.transfer.device_types import DeviceType, registered

DEVICE_TYPE = "virtual_cuda"


class _Backend(backend_registration._DummyBackendModule):
    """What torch asks of `torch.<backend>`; nothing of it has an effect."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def synchronize(self, *args: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def get_rng_state(self, *args: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *args: Any) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def device(self, device: Any) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


_TAKING_STORAGES = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Without its cache for operations on storages: the cache's keys would keep them alive."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        enabled = self.cache_enabled
        self.cache_enabled = enabled and func not in _TAKING_STORAGES
        try:
            return super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = enabled

    def __deepcopy__(self, memo: Any) -> "_FakeMode":
        """Copies of tensors, whose attributes are copied too, stay tensors of this mode."""
        return self


@cache
def _register() -> list[torch.library.Library]:
    backend_registration._setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_Backend())
    return autocast.register(DEVICE_TYPE) + attention.register_softmax()


@contextmanager
def simulation(
    like: str,
    clock: VirtualClock | None = None,
    running_module: Callable[[], str] = str,
    on_teacher_block: Callable[[torch.Tensor], object] = id,
) -> Iterator[tuple[torch.device, Unknowns]]:
    """Tensors made inside are fake; gives the device to build on and the record of guesses.

    Args:
        like: "cuda", the virtual accelerator; "cpu", fake tensors that follow the CPU's rules.
        clock: tells copies and offloaders the time; its card's compute capability decides on attention's kernels.
        running_module: names the module that is running, for errors.
        on_teacher_block: called with the device memory that teachers take.

    Call it in a process of its own: it stays registered, and an exception in a backend thread would end the process,
    which is why autograd's threads are off.
    """
    clock = VirtualClock(DEFAULT_CARD) if clock is None else clock
    unknowns = Unknowns(running_module)
    device = torch.device("cpu")
    with ExitStack() as stack:
        stack.enter_context(_without_cuda())
        stack.enter_context(_untraced())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if like == "cuda":
            _register()
            device = torch.device(DEVICE_TYPE, 0)
            stack.enter_context(autocast.shared_casts())
            capability = clock.card.compute_capability
            stack.enter_context(attention.attention_as_on_cuda(DEVICE_TYPE, capability))
            stack.enter_context(_autocast_for_cuda())
            stack.enter_context(_accelerate_on(device))
        stack.enter_context(_nothing_compiles(unknowns))
        stack.enter_context(_modules_move())
        stack.enter_context(registered(device.type, _simulated(clock, on_teacher_block)))
        stack.enter_context(weights_come_and_go())
        stack.enter_context(_foreach_takes_fakes())
        stack.enter_context(warnings.catch_warnings())
        # Deep copies of tensors look at the pointer, and copy a fake one as they should.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        stack.enter_context(_FakeMode(allow_non_fake_inputs=True))
        stack.enter_context(unknowns)
        yield device, unknowns


def _simulated(clock: VirtualClock, on_teacher_block: Callable[[torch.Tensor], object]) -> DeviceType:
    """Describe the simulated device to those who copy, offload and stream."""

    def make_copier(device: torch.device, pin_memory: bool, purpose: str) -> VirtualCopier:
        return VirtualCopier(clock, device, on_teacher_block if purpose == "teacher" else id)

    return DeviceType(
        make_copier=make_copier,
        make_clock=lambda device: clock,
        map_host=as_seen_by,
        # Offloaders hide their own operations from the mode that they opened, the newest. The modes below make tensors
        # fake, and go on.
        hide_operations=_pop_mode_temporarily,
        tensor_class=FakeTensor,
        is_unlimited=True,
    )


@contextmanager
def _without_cuda() -> Iterator[None]:
    """A simulation gives the same result beside a GPU as without one, and never wakes a driver in a forked process."""
    with patch.object(torch.cuda, "is_available", lambda: False):
        yield


@contextmanager
def _untraced() -> Iterator[None]:
    """transformers takes fake tensors for a trace and then builds explicit attention masks, as no training run does."""
    holders = [seam, *(module for name, module in sys.modules.items() if name.startswith("transformers."))]
    with ExitStack() as stack:
        for holder in holders:
            if vars(holder).get("is_tracing") is seam.is_tracing and holder is not seam:
                stack.enter_context(patch.object(holder, "is_tracing", _never))
        stack.enter_context(patch.object(seam, "is_tracing", _never))
        yield


def _never(tensor: Any = None) -> bool:
    return False


@contextmanager
def _nothing_compiles(unknowns: Unknowns) -> Iterator[None]:
    """Functions and modules run as they are written; fused kernels would hold fewer temporaries."""

    def as_written(function: Any = None, **options: Any) -> Any:
        unknowns.guesses["compiled code simulated as it is written, with all its temporaries"] += 1
        return function if function is not None else lambda given: given

    with patch.object(torch, "compile", as_written), patch.object(nn.Module, "compile", as_written):
        yield


@contextmanager
def _autocast_for_cuda() -> Iterator[None]:
    """Code that says torch.autocast("cuda") means the accelerator that is simulated."""
    plain = torch.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain(self, DEVICE_TYPE if device_type == "cuda" else device_type, *args, **kwargs)

    with patch.object(torch.autocast, "__init__", init):
        yield


@contextmanager
def _foreach_takes_fakes() -> Iterator[None]:
    """Optimizers and gradient clipping choose their foreach path by a tensor's class."""
    with ExitStack() as stack:
        for module in (torch_optimizer, foreach_utils):
            types = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(patch.object(module, "_foreach_supported_types", types))
        yield


# How launchers tell a process its place among others, and accelerate that it is to use the CPU.
_LAUNCHED = ("ACCELERATE_USE_CPU", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextmanager
def _accelerate_on(device: torch.device) -> Iterator[None]:
    """An `Accelerator` made inside lands on the virtual device, alone, however this process was launched."""
    AcceleratorState._reset_state(reset_partial_state=True)
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    with (
        patch.dict(os.environ, environment, clear=True),
        patch.object(torch.distributed, "is_initialized", lambda: False),
        patch.object(PartialState, "default_device", device),
    ):
        yield


@contextmanager
def _modules_move() -> Iterator[None]:
    """`module.to()`, `.half()` and the like keep the identity of parameters, to which optimizers and ties refer.

    torch would swap a fake parameter with its moved copy, and refuses since fake tensors are known to a weak table.
    """

    def apply(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        for module in self.modules() if recurse else [self]:
            for parameter in module.parameters(recurse=False):
                _move(parameter, function)
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = function(buffer)
        return self

    with patch.object(nn.Module, "_apply", apply):
        yield


def _move(parameter: nn.Parameter, function: Any) -> None:
    with torch.no_grad():
        moved = function(parameter.detach())
    if moved.device == parameter.device and moved.dtype == parameter.dtype:
        return
    replace_memory(parameter, moved)
