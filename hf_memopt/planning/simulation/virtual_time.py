"""The time of a simulated step: the host starts kernels, which queue on the card's streams; copies have two queues.

The work of an operation is arithmetic of a kind, and bytes of the card's memory.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hf_memopt.autograd_state import in_backward
from hf_memopt.planning.accounting.allocation_log import GENERATION
from hf_memopt.planning.accounting.operation import Operation, device_kind
from hf_memopt.planning.cards.gpus import BACKWARD_SHARE, HOST_S, KERNEL_S, VIEW_SHARE, Card, speeds_of
from hf_memopt.planning.cards.memory_below import HOST_BYTES_PER_S
from hf_memopt.units import MIB

# Smaller work of the host hides behind the card's.
_LEAST_HOST_BYTES = MIB
MATRIX, CONVOLUTION, ATTENTION, MEMORY = "matrix", "convolution", "attention", "memory"
HALF, TF32, FLOAT32 = "half", "tf32", "float32"

_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "set_", "_unsafe_view", "resize_"}
_AMPERE = (8, 0)


class VirtualClock:
    """Seconds of the compute stream, moved by operations and by waiting for copies.

    The host starts one operation after the other, and the card computes them in turn; it waits where the host is
    slower. Operations on other streams run beside it, until one waits for the other. A step begins with both at the
    same moment. A simulated CPU starts operations at no cost; beside a card, operations on the CPU keep the host from
    starting others as long as its memory takes to read and write their tensors.
    """

    def __init__(self, card: Card, like: str = "cuda", host_bytes_per_s: float = HOST_BYTES_PER_S) -> None:
        self.card, self._host_bytes_per_s = card, host_bytes_per_s
        # The number of the stream that operations run on, and the moments at which the others are.
        self.stream = 0
        self._of_streams: dict[int, float] = {}
        self._unbooked = set() if like == "cpu" else {"cpu"}
        self._operation_s = 0.0 if like == "cpu" else HOST_S
        self._speeds = speeds_of(card)
        # The moments of the compute stream and of the host, or until which it has work, and all waiting for copies.
        self.now_s = self.host_s = self.stalled_s = 0.0
        # Time of the newest step, by phase, without generation, and of it the time of waiting for copies.
        self.phases_ms: defaultdict[str, float] = defaultdict(float)
        self.stalls_ms: defaultdict[str, float] = defaultdict(float)
        # Time is booked to phases until `_booked_s`, and waiting until `_stall_booked_s` of all waiting.
        self._booked_s = self._stall_booked_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def reached(self, mark: float) -> bool:
        return True

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start

    def wait_until(self, moment_s: float) -> None:
        self.stalled_s += max(0.0, moment_s - self.now_s)
        self.now_s = max(self.now_s, moment_s)

    def time_of(self, stream: int) -> float:
        return self._of_streams.get(stream, 0.0) if stream else self.now_s

    def hold_stream(self, stream: int, moment_s: float) -> None:
        if stream:
            self._of_streams[stream] = max(self.time_of(stream), moment_s)
        else:
            self.wait_until(moment_s)

    def hold_host(self, moment_s: float) -> None:
        self.host_s = max(self.host_s, moment_s)

    def end_step(self, phase: str) -> None:
        """Book the time that the host works or waits at the end of a step."""
        self.wait_until(self.host_s)
        self._book(phase)

    def begin_step(self) -> None:
        self.phases_ms, self.stalls_ms = defaultdict(float), defaultdict(float)
        self.host_s = self.now_s
        self._booked_s, self._stall_booked_s = self.now_s, self.stalled_s

    @contextmanager
    def repeating(self, num_more: int) -> Iterator[None]:
        """Multiply the time of the operations inside, but not of copies, by a factor.

        That is exact where host and card are as far apart afterwards as before.
        """
        now_s, started_s = self.now_s, self.host_s
        yield
        self.now_s += num_more * (self.now_s - now_s)
        self.host_s += num_more * (self.host_s - started_s)

    def charge(self, operation: Operation, phase: str) -> None:
        devices = set(map(device_kind, (*operation.inputs, *operation.outputs)))
        is_kernel = starts_kernel(operation.function)
        if not devices <= self._unbooked:
            share = (1 if is_kernel else VIEW_SHARE) * (BACKWARD_SHARE if in_backward() else 1)
            self.host_s += share * self._operation_s
            if is_kernel:
                self._run(self._duration_s(operation, devices))
        elif is_kernel and devices == {"cpu"}:
            num_bytes = sum(leaf.nbytes for leaf in (*operation.inputs, *operation.outputs))
            if num_bytes >= _LEAST_HOST_BYTES:  # the counters of optimizers and the like take no time
                self.work_on_host(num_bytes)
        self._book(phase)

    def _run(self, duration_s: float) -> None:
        ended_s = max(self.time_of(self.stream), self.host_s) + duration_s
        if self.stream:
            self._of_streams[self.stream] = ended_s
        else:
            self.now_s = ended_s

    def work_on_host(self, num_bytes: int) -> None:
        self.host_s += num_bytes / self._host_bytes_per_s

    def _book(self, phase: str) -> None:
        if phase != GENERATION:
            self.phases_ms[phase] += 1e3 * (self.now_s - self._booked_s)
            self.stalls_ms[phase] += 1e3 * (self.stalled_s - self._stall_booked_s)
        self._booked_s, self._stall_booked_s = self.now_s, self.stalled_s

    def _duration_s(self, operation: Operation, devices: set[str]) -> float:
        """The longer of its arithmetic and its memory traffic, plus a bit."""
        outputs = operation.outputs
        if len(devices) > 1 and "cpu" in devices and outputs and all(leaf.dim() for leaf in operation.inputs):
            return sum(leaf.nbytes for leaf in outputs) / self.card.link_bytes_per_s
        work = work_of(operation, self.card)
        share: float = getattr(self._speeds, work.kind if work.kind in (CONVOLUTION, ATTENTION) else work.precision)
        compute_s = work.flops / flops_per_s(work, self.card) / share
        memory_s = work.num_bytes / self.card.memory_bytes_per_s / self._speeds.memory
        return KERNEL_S + max(compute_s, memory_s)


class VirtualCopier:
    """Copies that take time and move nothing, with one queue in each direction; memory is released by its last user."""

    def __init__(
        self, clock: VirtualClock, device: torch.device, on_block: Callable[[Tensor], None] | None = None
    ) -> None:
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self._clock, self._device, self._on_block = clock, device, on_block
        self._to_host, self._to_device = (VirtualQueue(clock, clock.card.link_bytes_per_s) for _ in range(2))

    def empty_host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def empty_device(self, num_bytes: int) -> Tensor:
        block = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if self._on_block is not None:
            self._on_block(block)
        return block

    def release(self, buffer: Tensor) -> None: ...

    def to_device(self, source: Tensor, destination: Tensor) -> "VirtualTransfer":
        self.bytes_to_device += source.nbytes
        return self._to_device.copy(source.nbytes)

    def to_host(self, source: Tensor, destination: Tensor) -> "VirtualTransfer":
        self.bytes_to_host += source.nbytes
        return self._to_host.copy(source.nbytes)

    def settle(self) -> None: ...

    def stall_ms(self) -> float:
        return 1e3 * self._clock.stalled_s


class VirtualQueue:
    """Copies of which each begins when the one before it has ended."""

    def __init__(self, clock: VirtualClock, bytes_per_s: float) -> None:
        self._clock, self._bytes_per_s = clock, bytes_per_s
        self._free_at_s = 0.0

    def copy(self, num_bytes: int) -> "VirtualTransfer":
        self._free_at_s = max(self._clock.now_s, self._clock.host_s, self._free_at_s) + num_bytes / self._bytes_per_s
        return VirtualTransfer(self._clock, self._free_at_s)


class VirtualTransfer:
    """A copy between any two memories, which ends at a moment known beforehand: `ended_s`."""

    def __init__(self, clock: VirtualClock, ended_s: float) -> None:
        self._clock, self.ended_s = clock, ended_s

    def wait(self) -> None:
        self._clock.wait_until(self.ended_s)

    def is_over(self) -> bool:
        return self._clock.now_s >= self.ended_s

    @property
    def finished(self) -> "VirtualTransfer":
        return self

    # The words of an event, for `finished`.
    query, synchronize = is_over, wait


class VirtualEvent:
    """A moment of a stream, for others and for the host to wait for."""

    # Of the running simulation: libraries make streams and events by their classes alone.
    clock: ClassVar[VirtualClock]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._moment_s = 0.0

    def record(self, stream: "VirtualStream | None" = None) -> "VirtualEvent":
        self._moment_s = self.clock.time_of(self.clock.stream if stream is None else stream.number)
        return self

    def query(self) -> bool:
        return True

    def wait(self, stream: "VirtualStream | None" = None) -> None:
        self.clock.hold_stream(self.clock.stream if stream is None else stream.number, self._moment_s)

    def synchronize(self) -> None:
        self.clock.hold_host(self._moment_s)


class VirtualStream:
    """A queue of its own, with memory of its own for results."""

    # FSDP2 of torch 2.15 names streams to an operation that does nothing; 20 is torch's number for PrivateUse1.
    device_index, device_type = 0, 20

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = self.number = next(_stream_numbers)

    def wait_stream(self, other: "VirtualStream") -> None:
        VirtualEvent().record(other).wait(self)

    def wait_event(self, event: VirtualEvent) -> None:
        event.wait(self)

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        return (event or VirtualEvent()).record(self)

    def synchronize(self) -> None:
        self.record_event().synchronize()


_stream_numbers = itertools.count()
FIRST_STREAM = VirtualStream()


# --------------------------------------------------------------------------------------------- the work of operations


class KernelWork(NamedTuple):
    """The work of a kernel; `MEMORY` is all that is no arithmetic worth counting, `num_bytes` are read and written."""

    kind: str
    precision: str
    flops: float
    num_bytes: int


@cache
def starts_kernel(function: Any) -> bool:
    return not function.is_view and function.overloadpacket.__name__ not in _NO_KERNEL


def work_of(operation: Operation, card: Card) -> KernelWork:
    num_bytes = sum(leaf.nbytes for leaf in operation.inputs) + sum(leaf.nbytes for leaf in operation.outputs)
    flops = _flops(*operation[:4])
    kind = _kind(operation.function.overloadpacket.__name__) if flops else MEMORY
    return KernelWork(kind, _precision(kind, {leaf.dtype for leaf in operation.inputs}, card), flops, num_bytes)


def flops_per_s(work: KernelWork, card: Card) -> float:
    """Return the data sheet's speed. TF32 is half as fast as half precision."""
    if work.precision == FLOAT32:
        return card.float32_flops
    return card.half_flops if work.precision == HALF else card.half_flops / 2


def _kind(operation: str) -> str:
    if "_attention" in operation:
        return ATTENTION
    return CONVOLUTION if "convolution" in operation else MATRIX


def _precision(kind: str, dtypes: set[torch.dtype], card: Card) -> str:
    """Tensor cores take bfloat16 and TF32 from Ampere on; torch allows TF32 to convolutions, and else if it is told.

    Products of whole numbers in 8 bits are taken to be as fast as those of float16.
    """
    is_ampere = card.compute_capability >= _AMPERE
    if dtypes & {torch.float16, torch.int8} or (torch.bfloat16 in dtypes and is_ampere):
        return HALF
    allowed = (
        torch.backends.cudnn.allow_tf32 if kind == CONVOLUTION else torch.get_float32_matmul_precision() != "highest"
    )
    return TF32 if is_ampere and allowed and torch.bfloat16 not in dtypes else FLOAT32


def _flops(function: Any, args: Any, kwargs: Any, result: Any) -> float:
    if "_attention" in function.overloadpacket.__name__:
        return _attention_flops(function, args, kwargs)
    if function.overloadpacket is torch.ops.aten.convolution_backward:
        return _convolution_backward_flops(*args)
    aten = torch.ops.aten
    count = flop_registry.get(aten.mm if function.overloadpacket is aten._int_mm else function.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def _convolution_backward_flops(output: Tensor, input: Tensor, weight: Tensor, *settings: Any) -> float:
    """torch's own count takes grouped convolutions for dense ones. Each gradient costs as much as the forward pass."""
    transposed, mask = settings[4], settings[7]
    products = (input if transposed else output).numel() * weight[0].numel()
    return 2.0 * products * int(mask[0] + mask[1])


def _attention_flops(function: Any, args: Any, kwargs: Any) -> float:
    """torch's own count refuses fewer key heads than query heads. Backward has five products, forward two.

    Kernels skip what a causal mask hides, half of each product.
    """
    named = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
    product: float = 2.0 * named["query"].numel() * named["key"].shape[-2]
    is_backward = function.overloadpacket.__name__.endswith("_backward")
    return product * (5 if is_backward else 2) * (0.5 if named.get("is_causal") else 1)
