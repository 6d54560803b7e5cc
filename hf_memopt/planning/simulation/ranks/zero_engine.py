"""DeepSpeed's ZeRO on the simulated device. Imports DeepSpeed, so it is imported only where that is used.

Its code runs as it is. It asks one object for streams, names and free memory, which is given to it here, and it is
answered where it asks for values.
"""

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cpuinfo
import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from hf_memopt.planning.accounting.allocation_log import OPTIMIZER
from hf_memopt.planning.accounting.categories import COMMUNICATION, FROZEN, GATHERED, GRADIENT, PARAMETER, StepLabels
from hf_memopt.planning.simulation.virtual_disk import AioHandle, CpuAdam, VirtualDisk
from hf_memopt.planning.simulation.virtual_time import FIRST_STREAM, VirtualEvent, VirtualStream

_OPTIMIZERS = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
# DeepSpeed asks for this optimizer, which compiles its kernels when it is imported.
with patch.object(torch, "compile", lambda function: function):
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
# The package has torch itself under this name.
_TORCH_BACKEND = importlib.import_module("deepspeed.comm.torch")


class DeviceAsCuda(CPU_Accelerator):  # type: ignore[misc]
    """A device for DeepSpeed that needs no driver, with CUDA's answers where they decide allocations."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._module = torch.get_device_module(device)

    def is_synchronized_device(self) -> bool:
        return False

    def is_fp16_supported(self) -> bool:
        return True

    def available_memory(self, device_index: Any = None) -> int:
        return sys.maxsize

    def device_name(self, device_index: Any = None) -> str:
        return self._device.type

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return str(self._device)

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type

    Stream, Event = VirtualStream, VirtualEvent

    def stream(self, stream: Any) -> Any:
        return self._module.stream(stream)

    def current_stream(self, device_index: Any = None) -> Any:
        current = self._module.current_stream()
        return current if isinstance(current, VirtualStream) else FIRST_STREAM  # torch's CPU has none of ours

    default_stream = current_stream


@contextmanager
def zero_as_on_cuda(device: torch.device) -> Iterator[None]:
    with (
        patch.object(real_accelerator, "ds_accelerator", DeviceAsCuda(device)),
        # On hosts it would compile collectives of its own.
        patch.object(_TORCH_BACKEND, "build_shm_op", lambda: None),
        # It knows streams of CUDA alone. The allocator would use memory again only after the other stream.
        patch.object(Tensor, "record_stream", lambda tensor, stream: None),
    ):
        yield


@contextmanager
def zero_without_values(labels: StepLabels, disk: VirtualDisk) -> Iterator[None]:
    """Answer DeepSpeed's questions about values: gradients are finite, ranks agree. Label its buffers.

    Its compiled operations take time alone, and its files on `disk` do not exist.
    """
    with updates_labelled(labels), ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(zero_utils, "assert_lst_len_same_as_other_ranks", lambda numbers: None))
        files = SimpleNamespace(aio_handle=lambda *sizes, **options: AioHandle(disk))
        enter(patch.object(CPUAdamBuilder, "load", lambda builder, verbose=True: CpuAdam(disk.clock)))
        enter(patch.object(AsyncIOBuilder, "load", lambda builder, verbose=True: files))
        enter(patch.object(AsyncIOBuilder, "is_compatible", lambda builder, verbose=True: True))
        enter(patch.object(os, "makedirs", lambda *names, **options: None))
        enter(patch.object(shutil, "rmtree", lambda *names, **options: None))
        # Looking at the CPU runs programs.
        enter(patch.object(cpuinfo, "get_cpu_info", dict))
        enter(patch.object(zero_utils, "get_lst_from_rank0", list))
        labelled = _Labelled(labels)
        for optimizer in _OPTIMIZERS:
            enter(_wrapped(optimizer, "has_overflow", _finite))
            enter(_wrapped(optimizer, "_has_inf_or_nan", _look_through))
            enter(_wrapped(optimizer, "reduce_ready_partitions_and_remove_grads", labelled.reduce))
            enter(_wrapped(optimizer, "independent_gradient_partition_epilogue", labelled.end_backward))
        enter(_wrapped(DeepSpeedEngine, "__init__", labelled.init))
        enter(_wrapped(PartitionedParameterCoordinator, "fetch_sub_module", labelled.fetch))
        yield


def _wrapped(holder: type, name: str, around: Callable[..., Any]) -> Any:
    """Call `around(method, self, *arguments)` where the method was called."""
    method = getattr(holder, name)
    return patch.object(holder, name, lambda self, *args, **kwargs: around(method, self, *args, **kwargs))


def _finite(method: Any, optimizer: Any, *args: Any, **kwargs: Any) -> bool:
    """Look for infinities as DeepSpeed does, in memory of its size, and find none."""
    with patch.object(Tensor, "item", lambda tensor: 0):
        return bool(method(optimizer, *args, **kwargs))


def _look_through(has_inf_or_nan: Any, optimizer: Any, *args: Any) -> bool:
    has_inf_or_nan(*args)  # a static method
    return False


@contextmanager
def updates_labelled(labels: StepLabels) -> Iterator[None]:
    """Count all of DeepSpeed's step to the update: it unscales, copies updated weights, and waits for the host."""

    def step(method: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        with labels.updating():
            method(optimizer, *args, **kwargs)
        VirtualEvent.clock.end_step(OPTIMIZER)

    with ExitStack() as stack:
        for optimizer in _OPTIMIZERS:
            stack.enter_context(_wrapped(optimizer, "step", step))
        yield


class _Labelled:
    """Methods of DeepSpeed, as `_wrapped` calls them, with labels for the memory that they make or use."""

    def __init__(self, labels: StepLabels) -> None:
        self._labels = labels

    def init(self, method: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
        """Label the rank's share of each weight, which ZeRO-3 keeps in an attribute of the emptied weight."""
        method(engine, *args, **kwargs)
        for name, parameter in engine.module.named_parameters():
            if hasattr(parameter, "ds_tensor"):
                self._labels.add([parameter.ds_tensor], PARAMETER if parameter.requires_grad else FROZEN, name)

    def fetch(self, method: Any, coordinator: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        method(coordinator, module, *args, **kwargs)
        gathered = [each for each in module.parameters(recurse=False) if not getattr(each, "ds_persist", True)]
        self._labels.add(gathered, GATHERED)

    def reduce(self, method: Any, optimizer: Any, parameter: nn.Parameter, *args: Any) -> None:
        """Note that a weight's gradient is complete, before DeepSpeed copies it to a bucket and drops it."""
        self._labels.reach([parameter])
        method(optimizer, parameter, *args)

    def end_backward(self, method: Any, optimizer: Any) -> None:
        """Label the buckets, and the rank's share of the gradients that the method reduces from them."""
        self._labels.add([bucket.buffer for bucket in optimizer.ipg_buckets.values()], COMMUNICATION)
        method(optimizer)
        self._labels.add(list(optimizer.averaged_gradients.values()), GRADIENT)
