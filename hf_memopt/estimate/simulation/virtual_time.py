"""How long a simulated step would take: a roofline for compute, two queues for copies; streams take none."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hf_memopt.estimate.accounting.allocation_log import device_type, tensors_in
from hf_memopt.estimate.gpus import Card
from hf_memopt.transfer import Transfer

# Which part of a data sheet's figures kernels reach, and the least that a kernel takes. Ratios between plans depend
# little on them.
_EFFICIENCY = 0.6
_LAUNCH_S = 4e-6
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "set_", "_unsafe_view", "resize_"}


class VirtualClock:
    """Seconds of the compute stream, moved by operations and by waiting for copies.

    Args:
        card: how fast operations and copies are.
        like: what is simulated; beside "cuda" operations on the CPU take no time, and "cpu" is the device itself.

    Attributes:
        now_s: the moment at which the compute stream is.
        stalled_s: for how long it has waited for copies, over all steps.
        phases_ms: how long the newest step has taken, by phase.
        stall_ms: for how long the newest step has waited for copies.
    """

    def __init__(self, card: Card, like: str = "cuda") -> None:
        self.card = card
        self._unbooked = set() if like == "cpu" else {"cpu"}
        self.now_s = self.stalled_s = self.stall_ms = 0.0
        self.phases_ms: dict[str, float] = {}
        # Up to which moment time is booked to phases, and what of `stalled_s` belongs to earlier steps.
        self._booked_s = self._stalled_before_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def reached(self, mark: float) -> bool:
        return True

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start

    def wait_until(self, moment_s: float) -> None:
        """Let compute go on no earlier."""
        self.stalled_s += max(0.0, moment_s - self.now_s)
        self.now_s = max(self.now_s, moment_s)

    def begin_step(self) -> None:
        """Count the newest step's time from here."""
        self.phases_ms = {}
        self._booked_s, self._stalled_before_s = self.now_s, self.stalled_s

    def charge(self, function: Any, args: Any, kwargs: Any, result: Any, phase: str) -> None:
        """Let an operation take its time, and book all time since the last one to a phase."""
        self.now_s += self._duration_s(function, args, kwargs or {}, result)
        self.phases_ms[phase] = self.phases_ms.get(phase, 0.0) + 1e3 * (self.now_s - self._booked_s)
        self._booked_s = self.now_s
        self.stall_ms = 1e3 * (self.stalled_s - self._stalled_before_s)

    def _duration_s(self, function: Any, args: Any, kwargs: Any, result: Any) -> float:
        """Return what an operation takes: its arithmetic or its bytes, whichever takes longer."""
        if function.is_view or function.overloadpacket.__name__ in _NO_KERNEL:
            return 0.0
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(result))
        devices = {device_type(leaf) for leaf in (*inputs, *outputs)}
        if devices <= self._unbooked:
            return 0.0
        if len(devices) > 1 and "cpu" in devices and outputs and all(leaf.dim() for leaf in inputs):
            return sum(leaf.nbytes for leaf in outputs) / self.card.link_bytes_per_s
        flops = _flops(function, args, kwargs, result)
        compute_s = flops / self._flops_per_s({leaf.dtype for leaf in inputs})
        memory_s = sum(leaf.nbytes for leaf in (*inputs, *outputs)) / self.card.memory_bytes_per_s
        return max(_LAUNCH_S, compute_s / _EFFICIENCY, memory_s / _EFFICIENCY)

    def _flops_per_s(self, dtypes: set[torch.dtype]) -> float:
        """Return the speed of products of these types; tensor cores take bfloat16 from Ampere on.

        Those of whole numbers in 8 bits are taken to be as fast as those of float16.
        """
        has_bfloat16 = self.card.compute_capability >= (8, 0)
        is_half = dtypes & {torch.float16, torch.int8} or (torch.bfloat16 in dtypes and has_bfloat16)
        return self.card.half_flops if is_half else self.card.float32_flops


def _flops(function: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Floating point operations; 0 for what only moves memory."""
    if "_attention" in function.overloadpacket.__name__:
        return _attention_flops(function.overloadpacket.__name__.endswith("_backward"), args)
    if function.overloadpacket is torch.ops.aten.convolution_backward:
        return _convolution_backward_flops(*args)
    aten = torch.ops.aten
    count = flop_registry.get(aten.mm if function.overloadpacket is aten._int_mm else function.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def _convolution_backward_flops(output: Tensor, input: Tensor, weight: Tensor, *settings: Any) -> float:
    """torch's own count takes grouped convolutions for dense ones. Each gradient costs what the forward pass did."""
    transposed, mask = settings[4], settings[7]
    products = (input if transposed else output).numel() * weight[0].numel()
    return 2.0 * products * int(mask[0] + mask[1])


def _attention_flops(is_backward: bool, args: Any) -> float:
    """torch's own count refuses fewer key heads than query heads. Backward has five products, forward two."""
    query, key = args[1:3] if is_backward else args[:2]
    product: float = 2.0 * query.numel() * key.shape[-2]
    return product * (5 if is_backward else 2)


class VirtualCopier:
    """Copies that take time and move nothing: fake tensors have no contents. One queue in each direction.

    Args:
        clock: of the compute stream.
        device: where `empty_device` allocates.
        on_block: called with each block that `empty_device` allocates.
    """

    def __init__(
        self, clock: VirtualClock, device: torch.device, on_block: Callable[[Tensor], None] | None = None
    ) -> None:
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self._clock, self._device, self._on_block = clock, device, on_block
        self._free_at_s = {"host": 0.0, "device": 0.0}

    def empty_host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def empty_device(self, num_bytes: int) -> Tensor:
        block = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if self._on_block is not None:
            self._on_block(block)
        return block

    def release(self, buffer: Tensor) -> None:
        """Do nothing: memory returns with its last reference."""

    def to_device(self, source: Tensor, destination: Tensor) -> Transfer:
        self.bytes_to_device += source.nbytes
        return self._copy("device", source.nbytes)

    def to_host(self, source: Tensor, destination: Tensor) -> Transfer:
        self.bytes_to_host += source.nbytes
        return self._copy("host", source.nbytes)

    def stall_ms(self) -> float:
        return 1e3 * self._clock.stalled_s

    def _copy(self, direction: str, num_bytes: int) -> Transfer:
        begun_s = max(self._clock.now_s, self._free_at_s[direction])
        self._free_at_s[direction] = begun_s + num_bytes / self._clock.card.link_bytes_per_s
        return _VirtualTransfer(self._clock, self._free_at_s[direction])


class _VirtualTransfer:
    def __init__(self, clock: VirtualClock, ended_s: float) -> None:
        self._clock, self._ended_s = clock, ended_s

    def wait(self) -> None:
        self._clock.wait_until(self._ended_s)


class VirtualEvent:
    """A moment in a stream, which has always been reached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> "VirtualEvent":
        return self

    def query(self) -> bool:
        return True

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


class VirtualStream:
    """A queue of its own for operations, and memory of its own for their results. It takes no time.

    Attributes:
        number: 0, the first one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = next(_stream_numbers)

    def wait_stream(self, other: "VirtualStream") -> None: ...

    def wait_event(self, event: VirtualEvent) -> None: ...

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        return VirtualEvent()

    def synchronize(self) -> None: ...


_stream_numbers = itertools.count()
FIRST_STREAM = VirtualStream()
