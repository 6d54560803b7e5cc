"""One process of several that train together, without the others: collectives move nothing and end at once.

The engines run as they are, on torch's process group "fake": DDP's reducer with its buckets, FSDP2 with its shards and
buffers, DeepSpeed's ZeRO (`zero_engine`). Their questions about values, which fake tensors have not, are answered. The
process is rank 0, whose shards are the largest where a length cannot be divided.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Logger, Reducer
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_memopt.planning.accounting.categories import COMMUNICATION, StepLabels
from hf_memopt.planning.simulation.patched_accelerate import first_of_ranks
from hf_memopt.planning.simulation.patched_everywhere import patched_everywhere
from hf_memopt.planning.simulation.virtual_base import VirtualBase

BACKEND = "fake"


@contextmanager
def first_of(num_ranks: int, device: torch.device, base: VirtualBase) -> Iterator[None]:
    """Make this process the first of so many, whose memory `base` labels, and whose engines write to its disk."""
    if distributed_c10d.is_initialized():
        raise ValueError(
            f"num_gpus={num_ranks}: this process belongs to a process group already, so that none can be simulated; "
            "estimate before torch.distributed is initialised, or in a process of its own"
        )
    with ExitStack() as stack:
        enter = stack.enter_context

        def begin_zero() -> None:
            from hf_memopt.planning.simulation.ranks.zero_engine import zero_as_on_cuda, zero_without_values

            enter(zero_as_on_cuda(device))
            enter(zero_without_values(base.labels, base.disk))

        enter(first_of_ranks(num_ranks, device, BACKEND, begin_zero))
        # A simulation of one process denies that there are others.
        enter(patch.object(dist, "is_initialized", distributed_c10d.is_initialized))
        enter(meshes_with_values())
        enter(unseen_shape_propagation())
        enter(_reducers_on_fake_tensors(base.labels))
        dist.init_process_group(BACKEND, store=FakeStore(), rank=0, world_size=num_ranks)
        stack.callback(dist.destroy_process_group)
        yield


def meshes_with_values() -> Any:
    """Give device meshes the numbers of their ranks, in host memory that no mode sees."""
    plain = device_mesh.init_device_mesh
    return patched_everywhere("init_device_mesh", plain, _disable_current_modes()(plain))


def unseen_shape_propagation() -> Any:
    """Hide the tensors of global shape on which DTensors find out shapes: they have no memory."""
    plain = ShardingPropagator._propagate_tensor_meta_non_cached
    return patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", _disable_current_modes()(plain))


@contextmanager
def _reducers_on_fake_tensors(labels: StepLabels) -> Iterator[None]:
    """Run DDP's reducer, in C++, without the reading of values."""
    make, rebuild = DistributedDataParallel.__init__, Reducer._rebuild_buckets

    def reduced(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        labels.add([bucket.buffer()], COMMUNICATION)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for name in ("find_unused_parameters", "static_graph"):
            if getattr(self, name):
                raise ValueError(f"{name}=True of DDP is not simulated; leave it out: buckets have the same bytes")
        # The group's work has no result, which the reducer wants. A hook may return one.
        self.register_comm_hook(None, reduced)
        self.register_comm_hook = _refuse_hook  # type: ignore[assignment,method-assign]

    def rebuild_buckets(self: Any) -> bool:
        with _RealIndices():  # type: ignore[no-untyped-call]
            return bool(rebuild(self))

    with (
        patch.object(dist, "_verify_params_across_processes", lambda *args: None),
        patch.object(DistributedDataParallel, "__init__", init),
        patch.object(Reducer, "_rebuild_buckets", rebuild_buckets),
        # It would say that it takes no times on this device.
        patch.object(Logger, "set_runtime_stats_and_log", lambda self: None),
    ):
        yield


def _refuse_hook(*args: Any) -> None:
    raise ValueError("communication hooks of DDP are not simulated; estimate the step without register_comm_hook")


class _RealIndices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the reducer real numbers of its buckets, which it sends to the other ranks and reads."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.int32:
            with _disable_current_modes():
                return function(*args, **kwargs | {"device": torch.device("cpu")})
        return function(*args, **kwargs)
