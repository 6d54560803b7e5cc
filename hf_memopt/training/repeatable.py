"""Doing the same computation twice: random numbers and buffers as they were, and micro-batches forward again."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

Outputs = tuple[Tensor, ...]
ForwardFn = Callable[[Any], Tensor | Outputs]
LossFn = Callable[..., Tensor]


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Make torch use kernels that give the same bits each time; it warns where it has none for an operation.

    Those of CUDA need `CUBLAS_WORKSPACE_CONFIG=:4096:8` in the environment before the first matrix product.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class RandomState:
    """The state of Python's and torch's generators, the CPU's and the current device's; NumPy's is not among them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._python = random.getstate()
        self._cpu = torch.get_rng_state()
        self._accelerator = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()

    def restore(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._cpu)
        if self._accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self._accelerator)


class BufferState:
    """Copies of a model's buffers, such as the running statistics that a forward pass changes."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, saved in self._saved:
                buffer.copy_(saved)


class CachedForward:
    """Micro-batches that have run forward without graphs, and can run again, and backward, one at a time.

    `around` makes a context for the second forward and the backward of a micro-batch, and is told whether that is the
    last one: there ranks exchange gradients. `leaves` has each output of all micro-batches, `(n, ...)`, to collect a
    gradient. Raises ValueError without micro-batches, or if `forward_fn` does not return tensors with samples first.
    """

    def __init__(
        self,
        forward_fn: ForwardFn,
        micro_batches: Iterable[Any],
        device: torch.device,
        around: Callable[[bool], AbstractContextManager[Any]] = lambda is_last: nullcontext(),
        backward: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = torch.autograd.backward,
    ) -> None:
        self._forward_fn, self._micro_batches = forward_fn, list(micro_batches)
        self._device, self._around, self._backward = device, around, backward
        if not self._micro_batches:
            raise ValueError("micro_batches is empty on this rank; every rank needs at least one")
        self._states: list[RandomState] = []
        outputs = []
        with torch.no_grad():
            for micro_batch in self._micro_batches:
                self._states.append(RandomState(device))
                outputs.append(self._forward(micro_batch))
        by_output = list(zip(*outputs, strict=True))
        self._sizes = [[len(part) for part in parts] for parts in by_output]
        self.leaves = [torch.cat(parts) for parts in by_output]
        for leaf in self.leaves:
            leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())

    def loss(self, loss_fn: LossFn) -> Tensor:
        """Return the loss of all outputs, whose `backward()` calls that of the micro-batches at the outputs."""
        device_type = self._device.type
        autocast = torch.autocast(  # the present one, for backward, which runs outside of the region of forward
            device_type,
            torch.get_autocast_dtype(device_type),
            enabled=torch.is_autocast_enabled(device_type),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

        def replay(gradients: Sequence[Tensor | None]) -> None:
            with torch.enable_grad(), autocast:
                self.backward(gradients)

        return loss_fn(*_GradientsTo.apply(replay, *self.leaves))  # type: ignore[no-untyped-call]

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Run each micro-batch forward again and backward. Random numbers then go on as if nothing had run twice."""
        cut = [
            [None] * len(lengths) if gradient is None else torch.split(gradient, lengths)
            for gradient, lengths in zip(gradients, self._sizes, strict=True)
        ]
        after = RandomState(self._device)
        for number, micro_batch in enumerate(self._micro_batches):
            with self._around(number == len(self._micro_batches) - 1):
                self._states[number].restore()
                self._backward(*_differentiable(self._forward(micro_batch), [parts[number] for parts in cut]))
        after.restore()

    def _forward(self, micro_batch: Any) -> Outputs:
        output = self._forward_fn(micro_batch)
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        if not all(isinstance(each, Tensor) and each.ndim for each in outputs):
            kinds = [
                f"a tensor {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__ for each in outputs
            ]
            raise ValueError(f"forward_fn returned {', '.join(kinds)}; return tensors whose first dimension is samples")
        return outputs


class _GradientsTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[[Sequence[Tensor | None]], None], *tensors: Tensor) -> Outputs:
        ctx.function = function
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.function(gradients)
        return None, *(None for _ in gradients)


def _differentiable(outputs: Outputs, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and gradient is not None
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]
