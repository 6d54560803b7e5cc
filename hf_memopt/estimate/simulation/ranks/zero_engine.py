"""DeepSpeed's ZeRO on the simulated device. Imports DeepSpeed, so it is imported only where that is used.

Its code runs as it is. It asks one object for streams, names and free memory, which is given to it here, and it is
answered where it asks for values.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from hf_memopt.estimate.accounting.categories import COMMUNICATION, FROZEN, GATHERED, GRADIENT, PARAMETER, StepLabels
from hf_memopt.estimate.simulation.virtual_time import VirtualEvent, VirtualStream

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
        return self._module.current_stream()

    def default_stream(self, device_index: Any = None) -> Any:
        return self._module.current_stream()


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
def zero_without_values(labels: StepLabels) -> Iterator[None]:
    """Answer DeepSpeed's questions about values: gradients are finite, ranks agree. Label its buffers."""
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(zero_utils, "assert_lst_len_same_as_other_ranks", lambda numbers: None))
        enter(patch.object(zero_utils, "get_lst_from_rank0", list))
        for optimizer in _OPTIMIZERS:
            enter(_wrapped(optimizer, "has_overflow", _finite))
            enter(_wrapped(optimizer, "reduce_ready_partitions_and_remove_grads", _gradient_labelled(labels)))
            enter(_wrapped(optimizer, "independent_gradient_partition_epilogue", _sums_labelled(labels)))
        enter(_wrapped(DeepSpeedEngine, "__init__", _partitions_labelled(labels)))
        enter(_wrapped(PartitionedParameterCoordinator, "fetch_sub_module", _gathered_labelled(labels)))
        yield


def _wrapped(holder: type, name: str, around: Callable[..., Any]) -> Any:
    """Call `around(method, self, *arguments)` where the method was called."""
    method = getattr(holder, name)
    return patch.object(holder, name, lambda self, *args, **kwargs: around(method, self, *args, **kwargs))


def _finite(method: Any, optimizer: Any, *args: Any, **kwargs: Any) -> bool:
    """Look for infinities as DeepSpeed does, in memory of its size, and find none."""
    with patch.object(Tensor, "item", lambda tensor: 0):
        return bool(method(optimizer, *args, **kwargs))


def _gradient_labelled(labels: StepLabels) -> Callable[..., None]:
    """A weight's gradient is there; then it is copied to a bucket and dropped."""

    def reduce(method: Any, optimizer: Any, parameter: nn.Parameter, *args: Any) -> None:
        labels.reach([parameter])
        method(optimizer, parameter, *args)

    return reduce


def _sums_labelled(labels: StepLabels) -> Callable[..., None]:
    """At the end of backward, gradients left in the buckets are reduced, and the rank's share put together."""

    def end(method: Any, optimizer: Any) -> None:
        labels.add([bucket.buffer for bucket in optimizer.ipg_buckets.values()], COMMUNICATION)
        method(optimizer)
        labels.add(list(optimizer.averaged_gradients.values()), GRADIENT)

    return end


def _partitions_labelled(labels: StepLabels) -> Callable[..., None]:
    """ZeRO-3 has left the weights empty, and keeps the rank's share of each beside it."""

    def init(method: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
        method(engine, *args, **kwargs)
        for name, parameter in engine.module.named_parameters():
            if hasattr(parameter, "ds_tensor"):
                labels.add([parameter.ds_tensor], PARAMETER if parameter.requires_grad else FROZEN, name)

    return init


def _gathered_labelled(labels: StepLabels) -> Callable[..., None]:
    def fetch(method: Any, coordinator: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        method(coordinator, module, *args, **kwargs)
        labels.add(
            [each for each in module.parameters(recurse=False) if not getattr(each, "ds_persist", True)], GATHERED
        )

    return fetch
