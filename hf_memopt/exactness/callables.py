"""`verify`: two functions that make the same training step, compared bit by bit."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_memopt.exactness.recorder import KnownModels, Recorder
from hf_memopt.exactness.recording import Recording
from hf_memopt.exactness.report import VerifyReport
from hf_memopt.exactness.runs import Kind, compare_runs
from hf_memopt.training.repeatable import RandomState, deterministic_kernels


def verify(plain: Callable[[], Any], switched: Callable[[], Any], steps: int = 2) -> VerifyReport:
    """Compare two functions that make the same training step, one of them with a switch that saves memory.

    Each function is called `steps` times in a row: `plain` twice over, since a step that does not repeat itself cannot
    be compared; then `switched`; where it differs, `plain` once more, with weights changed by one rounding, which gives
    the size that differences by rounding have here. Before each run, weights, buffers, gradients, the states of
    optimizers, and the generators of torch, numpy and Python are put back as they were at the first; after the last,
    too. Kernels are deterministic where torch has such, and each run compiles anew.

    Compared are inputs, losses, gradients after each backward pass, weights and optimizer states after each update, and
    tensors that the functions return, by the SHA-256 of their bytes. Backward passes are those by `backward`; results
    of `torch.autograd.grad` are compared if they are returned.

    Args:
        plain: takes nothing, and makes a whole step, with the same data at each first, second, ... call of a run.
        switched: makes the same step with the switch on; with the same model, or with one of its own.
        steps: at least 1.

    Returns:
        The report, whose `equal` is True if all bits are; as text it names the first tensor that differs, by how much,
        and what to look at.

    Raises:
        ValueError: `steps` is below 1, or `plain` ran nothing backward and returned no tensors.

    Costs the time of three or four runs and of reading each compared tensor at some 0.5 GB/s, and a copy of the models'
    weights, and of their optimizers' states, in host memory.

    Example:
        >>> report = verify(lambda: step(model), lambda: step(checkpointed_model))
        >>> assert report.equal, report
    """
    if steps < 1:
        raise ValueError(f"steps={steps} compares nothing; use at least 1")
    state, known = _State(), KnownModels()

    def record(kind: Kind, dtype: str | None) -> Recording:
        recorder = Recorder(
            perturbed=None if dtype is None else getattr(torch, dtype),
            known=known,
            on_tensors=state.add_tensors,
            on_optimizer=state.add_optimizer,
        )
        step = switched if kind == "switched" else plain
        _forget_compiled()
        with state.restored(), deterministic_kernels(), recorder:
            for _ in range(steps):
                recorder.add_results(step())
                recorder.end_step()
        if not any(place.phase in ("gradient", "result") for place in recorder.recording.tensors):
            name = "switched" if kind == "switched" else "plain"
            raise ValueError(f"{name}() ran nothing backward and returned no tensors; have it make a training step")
        return recorder.recording

    return compare_runs(record)


class _State:
    """Tensors, optimizers and generators as a first run found them."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._optimizers: dict[int, tuple[Optimizer, dict[str, Any]]] = {}
        self._random = RandomState(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))
        # Loaded by a program that draws from it.
        self._numpy = sys.modules.get("numpy")
        self._numpy_state = None if self._numpy is None else self._numpy.random.get_state()

    def add_tensors(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self._tensors:
                self._tensors[id(tensor)] = tensor, _host_copy(tensor), _host_copy(tensor.grad)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.setdefault(id(optimizer), (optimizer, deepcopy(optimizer.state_dict())))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put everything back when a run has ended."""
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        with torch.no_grad():
            for tensor, values, gradient in self._tensors.values():
                tensor.copy_(values)
                tensor.grad = None if gradient is None else gradient.to(tensor.device, copy=True)
        for optimizer, state in self._optimizers.values():
            optimizer.load_state_dict(deepcopy(state))
        self._random.restore()
        if self._numpy is not None:
            self._numpy.random.set_state(self._numpy_state)


def _forget_compiled() -> None:
    """Have compiled functions compile again: two that run the same code would share what the first one compiled."""
    if "torch._dynamo" in sys.modules:  # of a program that compiles
        torch._dynamo.reset()


def _host_copy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)
