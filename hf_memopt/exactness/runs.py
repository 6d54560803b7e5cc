"""`verify`: two functions that make the same training step, compared bit by bit, and the order of recorded runs."""

import statistics
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from hf_memopt.autograd_state import COMES_AND_GOES
from hf_memopt.exactness.comparison import LOW_PRECISIONS, Yardstick, compare
from hf_memopt.exactness.recorder import KnownModels, Recorder
from hf_memopt.exactness.recording import Recording, parts_of
from hf_memopt.exactness.report import STAYS_ON, RunFigures, VerifyReport, report_of
from hf_memopt.ranges import COUNT
from hf_memopt.training.repeatable import RandomState, deterministic_kernels

Kind = Literal["plain", "plain again", "switched", "plain, in float32", "switched, in float32", "plain, rounded once"]


def is_switched(kind: Kind) -> bool:
    return kind.startswith("switched")


def is_in_float32(kind: Kind) -> bool:
    return kind.endswith("in float32")


def compare_runs(record: Callable[[Kind, str | None], Recording]) -> VerifyReport:
    """Compare a plain run with a switched one, and with itself after that; where they differ, by a yardstick.

    Runs in lower precision are made again in float32, where rounding vanishes. If that is not possible, or they
    compute in float32 already, the plain run is made again from weights that are changed by one rounding.

    `record` makes a run of a kind and returns its recording. To a run that is rounded it gets the name of the dtype to
    whose last place each weight is changed.
    """
    runs: list[RunFigures] = []

    def recorded(kind: Kind, dtype: str | None = None) -> Recording:
        found = record(kind, dtype)
        step_s = found.step_s[-1] if found.step_s else None
        runs.append(RunFigures(kind, found.peak_bytes, step_s, found.recording_s))
        return found

    plain = recorded("plain")
    switched = recorded("switched")
    again = recorded("plain again")
    control = compare(plain, again)
    if control.differences:
        report = report_of(plain, again, control, runs, is_control=True)
        return report if compare(switched, again).differences else replace(report, advice=STAYS_ON)
    comparison = compare(plain, switched)
    if comparison.differences:
        yardstick, dtype, reason = None, _dtype_of_gradients(plain), ""
        if plain.precision is not None:
            yardstick, dtype, reason = _in_float32(plain, plain.precision, recorded)
        comparison = compare(plain, switched, yardstick or Yardstick(recorded("plain, rounded once", dtype)))
        comparison.not_compared.extend([reason] if reason else [])
    return report_of(plain, switched, comparison, runs, is_control=False)


def _dtype_of_gradients(plain: Recording) -> str:
    """Return the lower precision that gradients show where a program casts weights itself, or else float64.

    Weights whose own dtype is coarser are rounded to that one.
    """
    first = (each for place, each in plain.tensors.items() if place.phase == "gradient" and place.micro_batch == 1)
    bits = [each.num_bits for each in first if len(each.shape) > 1 and each.num_bits]
    return LOW_PRECISIONS.get(statistics.median_low(bits), "float64") if bits else "float64"


def _in_float32(
    plain: Recording, precision: str, recorded: Callable[[Kind], Recording]
) -> tuple[Yardstick | None, str, str]:
    """Return the runs in float32, or else the dtype in which the plain run computes, and the reason."""
    found = None
    try:
        found = recorded("plain, in float32")
        if not compare(plain, found).differences:  # an autocast that has nothing to cast
            return None, _dtype_of_gradients(plain), ""
        bits = [each.num_bits for place, each in found.tensors.items() if place.phase == "gradient"]
        if not bits or statistics.median(bits) < max(LOW_PRECISIONS) + 1:
            return None, precision, "in float32: weights, or what computes with them, have a lower precision"
        return Yardstick(found, recorded("switched, in float32")), precision, ""
    except Exception as error:  # a program may rely on the lower precision
        return None if found is None else Yardstick(found), precision, f"in float32: {type(error).__name__}: {error}"


def merged(ranks: list[Recording]) -> Recording:
    """Return one recording of all processes of a run; memory and time are the largest, names tell the rank.

    Tensors are in the order of steps, so that the first that differs is the first of all ranks.
    """
    by_rank = [
        (replace(place, name=f"rank {rank}: {place.name}") if rank else place, found)
        for rank, recording in enumerate(ranks)
        for place, found in recording.tensors.items()
    ]
    tensors = dict(sorted(by_rank, key=lambda each: each[0].order))
    peaks = [each.peak_bytes for each in ranks if each.peak_bytes is not None]
    return replace(
        ranks[0],
        tensors=tensors,
        has_dropout=any(each.has_dropout for each in ranks),
        not_deterministic=sorted({operation for each in ranks for operation in each.not_deterministic}),
        peak_bytes=max(peaks, default=None),
        step_s=[max(times) for times in zip(*(each.step_s for each in ranks), strict=False)],
        recording_s=max(each.recording_s for each in ranks),
    )


def verify(plain: Callable[[], Any], switched: Callable[[], Any], steps: int = 2) -> VerifyReport:
    """Compare two functions that make the same training step, one of them with a switch that saves memory.

    Each function is called `steps` times in a row: `plain`, `switched`, and `plain` again, since a step that does not
    repeat itself cannot be compared; where `switched` differs, both in float32 if autocast computes in lower precision,
    or else `plain` from weights that are changed by one rounding, which shows the size that rounding has here. Before
    each run, the attributes of modules (parameters, buffers, modes, hooks, children), gradients, the groups, options
    and states of optimizers, and the generators of torch, numpy and Python are put back as they were at the first
    forward pass or update that used them; after the last, too. All else that goes on from step to step, such as a
    schedule of learning rates, an iterator of batches, or an average of weights in a model that is not trained, has to
    begin anew in each run. Kernels are deterministic where torch has such, and each run compiles anew.

    Compared are inputs, losses, gradients after each backward pass, weights and optimizer states after each update, and
    tensors that the functions return, by the SHA-256 of their bytes. Backward passes are those by `backward`; results
    of `torch.autograd.grad` are compared if they are returned.

    Args:
        plain: takes nothing, and makes a whole step, with the same data at each first, second, ... call of a run.
        switched: makes the same step with the switch on; with the same model, or with another one.
        steps: calls, at least 1. A call with several updates counts as several steps in the report.

    Returns:
        The report, whose `equal` is True if all bits are; as text it names the first tensor that differs, by how much,
        and likely causes.

    Raises:
        ValueError: `steps` is below 1, or `plain` ran nothing backward and returned no tensors.

    Costs the time of three to five runs and of reading each compared tensor at some 0.5 GB/s, and a copy of the models'
    weights, and of their optimizers' states, in host memory.

    Example:
        >>> report = verify(lambda: step(model), lambda: step(checkpointed_model))
        >>> assert report.equal, report
    """
    COUNT.check("steps", steps)
    state, known = _State(), KnownModels()

    def record(kind: Kind, dtype: str | None) -> Recording:
        recorder = Recorder(perturbed=dtype, in_float32=is_in_float32(kind), known=known, keeper=state)
        name, step = ("switched", switched) if is_switched(kind) else ("plain", plain)
        _forget_compiled()
        try:
            with deterministic_kernels(), recorder:
                for _ in range(steps):
                    recorder.add_results(step())
                    recorder.end_step()
        finally:
            state.restore()
        if not any(place.phase in ("loss", "result") for place in recorder.recording.tensors):
            raise ValueError(f"{name}() ran nothing backward and returned no tensors; have it make a training step")
        return recorder.recording

    return compare_runs(record)


# Of torch's own attributes of modules. Subclasses may refuse to be changed.
_CHANGED_IN_PLACE = (dict, OrderedDict, set)


class _State:
    """Models, other leaves, optimizers and generators as a first run found them."""

    def __init__(self) -> None:
        # Classes and attributes of modules, with the contents of mappings and sets, such as parameters and hooks.
        self._modules: dict[nn.Module, tuple[type, dict[str, tuple[Any, Any]]]] = {}
        self._tensors: dict[int, tuple[_Kept, _Kept | None, bool]] = {}
        self._optimizers: dict[int, tuple[Optimizer, _OptimizerState]] = {}
        self._random = RandomState(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))
        # Loaded by a program that draws from it.
        self._numpy = sys.modules.get("numpy")
        self._numpy_state = None if self._numpy is None else self._numpy.random.get_state()

    def add_model(self, model: nn.Module) -> None:
        for module in model.modules():
            if module not in self._modules:  # a later run may have exchanged them
                contents = {
                    name: (value, copy(value) if type(value) in _CHANGED_IN_PLACE else None)
                    for name, value in vars(module).items()
                }
                self._modules[module] = type(module), contents
        self.add_leaves([*model.parameters(), *model.buffers()])

    def add_leaves(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if id(leaf) not in self._tensors:
                gradient = leaf.grad if leaf.is_leaf else None
                kept = None if gradient is None else _Kept(gradient)
                self._tensors[id(leaf)] = _Kept(leaf), kept, leaf.requires_grad

    def add_optimizer(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer, _OptimizerState(optimizer)

    def restore(self) -> None:
        for module, (kind, contents) in self._modules.items():
            if type(module) is not kind:  # parametrisations change it
                module.__class__ = kind
            vars(module).clear()
            for name, (value, content) in contents.items():
                if content is not None:  # handles of hooks refer to the mapping itself
                    value.clear()
                    value.update(content)
                vars(module)[name] = value
        with torch.no_grad():
            for kept, gradient, requires_grad in self._tensors.values():
                tensor = kept.restored()
                if tensor.is_leaf:
                    tensor.requires_grad_(requires_grad)
                    tensor.grad = None if gradient is None else gradient.restored()
            for optimizer, state in self._optimizers.values():
                state.restore(optimizer)
        self._random.restore()
        if self._numpy is not None:
            self._numpy.random.set_state(self._numpy_state)


class _OptimizerState:
    """The state of an optimizer as it was: its own `load_state_dict` would cast tensors to the weights' dtype."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._state = {parameter: tree_map(_kept, state) for parameter, state in optimizer.state.items()}
        self._groups = [
            (group, group["params"], list(group["params"]), tree_map(_kept, {**group, "params": None}))
            for group in optimizer.param_groups
        ]

    def restore(self, optimizer: Optimizer) -> None:
        restored = {parameter: tree_map(_restored, state) for parameter, state in self._state.items()}
        optimizer.state = defaultdict(dict, restored)
        optimizer.param_groups[:] = [group for group, *_ in self._groups]
        for group, parameters, before, options in self._groups:
            parameters[:] = before
            group.clear()
            group.update(tree_map(_restored, options), params=parameters)


class _Kept:
    """A tensor and its values on the host, those of the parts of a wrapper: not every wrapper can be copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        # Streamed weights cannot be written.
        parts = [
            part for _, part in parts_of(tensor) if part.device.type != "meta" and not hasattr(part, COMES_AND_GOES)
        ]
        self._parts = [(part, _written_once(part.detach()).to("cpu", copy=True)) for part in parts]

    def restored(self) -> Tensor:
        for part, values in self._parts:
            held = _written_once(part)
            if (held.dtype, held.shape) == (values.dtype, values.shape):
                held.copy_(values)
            else:  # exchanged, as by `module.to`
                part.data = values.to(part.device, copy=True)
        return self._tensor


def _written_once(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that holds repeated elements once: expanded tensors cannot be written."""
    if tensor.layout != torch.strided:
        return tensor
    return tensor[tuple(slice(0, 1 if stride == 0 else None) for stride in tensor.stride())]


def _kept(value: Any) -> Any:
    return _Kept(value) if isinstance(value, Tensor) else deepcopy(value)


def _restored(value: Any) -> Any:
    return value.restored() if isinstance(value, _Kept) else deepcopy(value)


def _forget_compiled() -> None:
    """Make compiled functions compile again: two that run the same code would share the code of the first one."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.convert_frame.input_codes.seen:  # resetting imports Inductor for CUDA
        torch.compiler.reset()
