"""An accelerator without hardware: fake tensors on a device that follows CUDA's rules.

Fake tensors on "cuda" need a driver (backward fails without one, autocast switches itself off, attention takes the math
path), and those on "cpu" follow the CPU's rules. torch's PrivateUse1 Python backend is an accelerator to the autograd
engine, to the optimizers and to operators that have one path for accelerators; the rest is given to it here.
Registering it is for a process and for good, so a simulation has a process of its own.

Inside of `simulation` every operation passes three dispatch modes, from the top down: the allocation log, which the
caller opens, the answers to questions about values (`data_dependent`), and torch's fake mode, which computes shapes and
allocates nothing. A mode that the simulated step opens, such as an offloader's, lies above them.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.optim.optimizer as torch_optimizer
import torch.utils._foreach_utils as foreach_utils
import torch.utils.backend_registration as backend_registration
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode_temporarily

from hf_memopt.autograd_state import COMES_AND_GOES
from hf_memopt.planning.accounting.allocation_log import StepPhases
from hf_memopt.planning.cards.gpus import DEFAULT_CARD
from hf_memopt.planning.simulation import DEVICE_TYPE, patched_accelerate, patched_transformers, patched_trl
from hf_memopt.planning.simulation.data_dependent import DataDependentOps
from hf_memopt.planning.simulation.fake_mode import SimulatedTensors
from hf_memopt.planning.simulation.kernels import attention, autocast
from hf_memopt.planning.simulation.virtual_base import VirtualBase, VirtualFileHome
from hf_memopt.planning.simulation.virtual_time import FIRST_STREAM, VirtualClock, VirtualEvent, VirtualStream
from hf_memopt.transfer.backends import DeviceBackend, registered
from hf_memopt.weights.residency.away import WatchedParameter


class _Backend(backend_registration._DummyBackendModule):
    """The functions that torch asks of `torch.<backend>`; nothing but the choice of a stream has an effect."""

    Stream, Event = VirtualStream, VirtualEvent

    def __init__(self) -> None:
        self.phases = StepPhases()
        self.clock = VirtualClock(DEFAULT_CARD)
        self._running = FIRST_STREAM

    def current_stream(self, device: Any = None) -> VirtualStream:
        return self._running

    @contextmanager
    def stream(self, stream: VirtualStream) -> Iterator[None]:
        before = self._running
        self._switch(stream)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, stream: VirtualStream) -> None:
        self._running, self.phases.stream, self.clock.stream = stream, stream.number, stream.number

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def synchronize(self, *args: Any) -> None: ...

    set_device = empty_cache = set_rng_state = manual_seed = synchronize

    def get_rng_state(self, *args: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def device(self, device: Any) -> nullcontext[None]:
        return nullcontext()


_BACKEND = _Backend()


@cache
def _register() -> list[torch.library.Library]:
    backend_registration._setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_BACKEND)
    return autocast.register() + attention.register_softmax()


def phase_named(name: str) -> AbstractContextManager[None]:
    """Count what the code inside allocates to the phase `name` of the running simulation."""
    return _BACKEND.phases.named(name)


@contextmanager
def simulation(
    like: str, base: VirtualBase, free_host_bytes: Callable[[], int] = lambda: sys.maxsize
) -> Iterator[tuple[torch.device, DataDependentOps]]:
    """Make all tensors fake; gives the device to build on and the mode that notes assumptions.

    `like` "cpu" means fake tensors by the CPU's rules. `base` has the copiers, the disk and the clock, whose card
    decides on attention's kernels. `free_host_bytes` is host memory that copies may take. An exception in a backend
    thread would end the process, which is why autograd's threads are off.
    """
    clock, phases = base.clock, base.disk.phases
    data_dependent = DataDependentOps(phases)
    _BACKEND.phases, _BACKEND.clock, VirtualEvent.clock = phases, clock, clock
    device = torch.device("cpu")
    if like == "cuda":
        _register()
        device = torch.device(DEVICE_TYPE, 0)
    with ExitStack() as stack:
        enter = stack.enter_context
        # Results are the same beside a GPU, and no driver is woken in a forked process.
        enter(patch.object(torch.cuda, "is_available", lambda: False))
        enter(patched_transformers.masks_as_untraced())
        enter(torch.autograd.set_multithreading_enabled(False))
        if like == "cuda":
            enter(autocast.shared_casts())
            enter(attention.attention_as_on_cuda(clock.card.compute_capability))
            enter(patched_trl.fused_head_as_on_cuda())
            enter(_redirect_autocast())
            enter(patched_accelerate.alone_on(device))
            enter(patch.object(Tensor, "pin_memory", lambda tensor, *args: tensor))
        # On it FSDP2 lets gradients leave, and has it wait for weights that were gathered for nothing.
        enter(patch.object(torch.accelerator, "current_stream", torch.get_device_module(device).current_stream))
        enter(_disable_compile(data_dependent))
        enter(_keep_parameters_when_moved())
        # Teachers pack weights by address, and move weights' data between devices, which torch refuses.
        enter(patch.object(FakeTensor, "data", property(Tensor.data.__get__, _rebind)))  # type: ignore[attr-defined]
        enter(patch.object(FakeTensor, "data_ptr", _address))
        enter(patch.object(torch.UntypedStorage, "data_ptr", _address_of_storage))
        enter(patch.object(FakeTensor, "numpy", _array))
        enter(patch.object(FakeTensor, "set_", WatchedParameter.set_))
        enter(registered(device.type, _simulated_type(base, free_host_bytes)))
        # Optimizers and gradient clipping choose their foreach path by a tensor's class.
        for module in (torch_optimizer, foreach_utils):
            types = [*module._foreach_supported_types, FakeTensor]
            enter(patch.object(module, "_foreach_supported_types", types))
        enter(patch.object(FakeTensor, "__format__", _formatted))
        enter(warnings.catch_warnings())
        # Deep copies of tensors look at the pointer, and copy a fake one as they should.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        # The mode that is entered last sees each operation first: `data_dependent` answers where the fake mode raises.
        enter(SimulatedTensors(allow_non_fake_inputs=True))
        enter(data_dependent)
        yield device, data_dependent


def _simulated_type(base: VirtualBase, free_host_bytes: Callable[[], int]) -> DeviceBackend:
    return DeviceBackend(
        make_copier=base.make_copier,
        make_clock=lambda device: base.clock,
        map_host=_on_device,
        # From the offloader's mode, the newest: those below make the results fake.
        hide_operations=_pop_mode_temporarily,
        tensor_class=FakeTensor,
        is_unlimited=True,
        free_host_bytes=free_host_bytes,
        open_file=base.disk.open_file,
        home_in_files=partial(VirtualFileHome, base),
        has_values=False,
    )


def _formatted(tensor: Tensor, spec: str) -> str:
    """Return the text of a number, as of a plain tensor: some models look modules up by it."""
    return format(tensor.detach().item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)


# --------------------------------------------------------------------- patches for torch's autocast and compiler


def _redirect_autocast() -> Any:
    """Make `torch.autocast("cuda")` mean the accelerator that is simulated."""
    plain = torch.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain(self, DEVICE_TYPE if device_type == "cuda" else device_type, *args, **kwargs)

    return patch.object(torch.autocast, "__init__", init)


@contextmanager
def _disable_compile(data_dependent: DataDependentOps) -> Iterator[None]:
    """Run functions and modules as they are written; fused kernels would hold fewer temporaries."""

    def as_written(function: Any = None, **options: Any) -> Any:
        data_dependent.guesses["compiled code simulated as it is written, with all its temporaries"] += 1
        return function if function is not None else lambda given: given

    with patch.object(torch, "compile", as_written), patch.object(nn.Module, "compile", as_written):
        yield


# ------------------------------------------------------------- operations that torch lacks for fake tensors


def _keep_parameters_when_moved() -> Any:
    """Make `module.to()`, `.half()` and the like keep parameters, to which optimizers and ties refer, the same objects.

    torch would swap a fake parameter with its moved copy, and refuses since a weak table knows fake tensors.
    """

    def apply(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        for module in self.modules() if recurse else [self]:
            for parameter in module.parameters(recurse=False):
                if hasattr(parameter, COMES_AND_GOES):  # on the device already, without memory
                    continue
                with torch.no_grad():
                    moved = function(parameter.detach())
                if (moved.device, moved.dtype) != (parameter.device, parameter.dtype):
                    replace_memory(parameter, moved)
            for name, buffer in module._buffers.items():  # `named_buffers` would keep all of them to its end
                if buffer is not None:
                    module._buffers[name] = function(buffer)
        return self

    return patch.object(nn.Module, "_apply", apply)


def replace_memory(tensor: Tensor, memory: Tensor) -> None:
    """Assign `tensor.data = memory` across devices."""
    if isinstance(tensor, nn.Parameter):
        memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    tensor.__class__, memory.__class__ = memory.__class__, tensor.__class__
    tensor.__dict__, memory.__dict__ = memory.__dict__, tensor.__dict__
    torch._C._swap_tensor_impl(tensor, memory)


def _rebind(tensor: Any, memory: Tensor) -> None:
    if tensor.device == memory.device:
        Tensor.data.__set__(tensor, memory)  # type: ignore[attr-defined]
    else:
        replace_memory(tensor, memory.detach())


_storage_address = torch.UntypedStorage.data_ptr
# No storage reaches the next; Python's integers have room for that.
_APART_BITS = 48


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize)


def _address_of_storage(storage: torch.UntypedStorage) -> int:
    return storage._cdata << _APART_BITS if storage.device.type == "meta" else _storage_address(storage)


def _array(tensor: Tensor, *, force: bool = False) -> Any:
    """Return an array of ones, as a number that is asked for is 1; programs log them."""
    with _disable_current_modes():
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape).numpy()


def _on_device(memory: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device with the storage of host memory, which is counted once."""
    assert isinstance(memory, FakeTensor)
    with _disable_current_modes():
        seen = torch.empty(0, dtype=memory.dtype, device="meta")
        seen.set_(memory.untyped_storage(), 0, memory.size(), memory.stride())
        return FakeTensor(memory.fake_mode, seen, device)
