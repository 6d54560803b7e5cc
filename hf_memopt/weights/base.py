"""Weights that live in host memory or in files, and visit the device in forward, backward and update."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hf_memopt.autograd_state import COMES_AND_GOES, PARAMETER_TYPES, PLAIN_TYPES, in_backward
from hf_memopt.ranges import NOT_NEGATIVE
from hf_memopt.transfer import Copier, SyncCopier, copier_for
from hf_memopt.transfer.backends import backend_of
from hf_memopt.transfer.host_memory import return_freed_memory
from hf_memopt.transfer.scratch_file import check_disk
from hf_memopt.units import GIB, format_bytes
from hf_memopt.weights.gradients import Gradients
from hf_memopt.weights.homes.block_home import BlockHome
from hf_memopt.weights.homes.home import Home, make_home, several_ranks
from hf_memopt.weights.homes.packed_weights import PackedWeights, claim_device, return_second_tensors, stored_tensors
from hf_memopt.weights.homes.weight_files import loaded_from
from hf_memopt.weights.optimizer import OffloadedOptimizer, offloaded
from hf_memopt.weights.residency.backward_visits import WithStatement
from hf_memopt.weights.residency.guards import REMEDY, ModelState, ParameterGuards
from hf_memopt.weights.residency.selection import Selection, is_compiled, select
from hf_memopt.weights.residency.visiting import Visiting
from hf_memopt.weights.trained import TrainedWeights

logger = logging.getLogger(__name__)

BaseHome = Literal["auto", "host", "file"]
BASE_HOMES: tuple[str, ...] = get_args(BaseHome)
_REMEDY_OF_FROZEN = f"read or write it inside `with base.visit(module):` of its StreamedWeights, or {REMEDY}"
_REMEDY_OF_TRAINED = (
    "call adopt(optimizer) of its StreamedWeights for the one that updates it, and read or write it elsewhere inside "
    "`with weights.visit(module):`"
)
# The attribute of a model that holds the object by which its weights stream.
_STREAMED = "_hf_memopt_streamed_weights"
# The one in which DistributedDataParallel finds the names of parameters that it leaves alone.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


@dataclass(frozen=True)
class WeightsReport:
    """The cost of streamed weights; prints as text. Bytes and times are totals since they began to stream.

    Attributes:
        home: `"host"` or `"file"`.
        device: that runs the model.
        streamed_bytes: weights that stream.
        host_bytes: host memory of their copy, which all ranks of a machine share, and of gradients; with files, of the
            memory that reads and writes pass through.
        device_bytes: device memory of streamed weights now.
        peak_device_bytes: its peak.
        bytes_to_device: copied, or read, to the device.
        bytes_read: from files, without rows of embeddings.
        stall_ms: time for which compute waited for copies, and the host for reads of files.
        resident: by reason, the bytes of frozen weights that stay on the device.
        names: by reason, the names of those that would stream otherwise.
        smallest_budget_bytes: device memory that the visits of a step need; None before the first step.
        trained: whether weights that train stream.
        bytes_to_home: of weights that were written.
        gradient_bytes: read, and written, of gradients.
    """

    home: str
    device: str
    streamed_bytes: int
    host_bytes: int
    device_bytes: int
    peak_device_bytes: int
    bytes_to_device: int
    bytes_read: int
    stall_ms: float
    resident: dict[str, int] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    smallest_budget_bytes: int | None = None
    trained: bool = False
    bytes_to_home: int = 0
    gradient_bytes: tuple[int, int] = 0, 0

    def __str__(self) -> str:
        lines = [
            f"{'weights' if self.trained else 'frozen weights'}: {format_bytes(self.streamed_bytes)} stream from "
            f"{'their files' if self.home == 'file' else 'host memory'} to {self.device}",
            f"  {self.device}: {format_bytes(self.device_bytes)} now, {format_bytes(self.peak_device_bytes)} at most; "
            f"host memory: {format_bytes(self.host_bytes)}",
            f"  brought: {format_bytes(self.bytes_to_device)}, of these from files {format_bytes(self.bytes_read)}; "
            f"waited {self.stall_ms:.1f} ms",
        ]
        if self.trained:
            read, written = map(format_bytes, self.gradient_bytes)
            lines.append(
                f"  updates wrote {format_bytes(self.bytes_to_home)}; gradients: {written} written, {read} read"
            )
        for reason, num_bytes in self.resident.items():
            first, *others = self.names.get(reason, ("",))
            named = f": {first}" if first else ""
            more = f" and {len(others)} more" if others else ""
            lines.append(f"  stays: {format_bytes(num_bytes)}, {reason}{named}{more}")
        return "\n".join(lines)


class StreamedWeights:
    """Brings the weights of a model to the device for each use, in forward and backward, to take little of it.

    Gradients are those of the resident run, bit for bit. Each module's call brings the weights that it reads, and so
    does autograd before it runs the nodes of that call; they are dropped when that is over. Other code that reads a
    weight within a pass has it brought, too. The order of visits is learned in the first step. From then on the next
    weights are on their way while the present ones compute. It needs no checkpointing and goes with both kinds. Threads
    may share the model.

    With `trained=True` trainable weights stream as well, and each gradient moves to the home once it is complete.
    After `adopt(optimizer)` an update brings weights, gradients and state for a few parameters at a time. `p.grad` is
    then an object that clipping, scaling and logging use as ever: functions of it bring its bytes, but for norms, which
    were recorded, and factors, which wait for the update.

    Between passes a weight is away: a read or write raises a RuntimeError that names it, except inside of `visit`.

    An exception or an interrupt in the constructor leaves the model as it was.

    Make it before a `Trainer`, an optimizer or `DistributedDataParallel` gets the model: those would move all weights
    to the device. The weights are on `device` from then on, as far as anybody can see, and others follow them there.

    Args:
        model: its parameters without `requires_grad` stream, in modules of any class. The smallest, one per cent of the
            bytes at most, stay on the device, and so do those whose memory a trained weight, a buffer or an attribute
            has too. Rows of embeddings are looked up at home.
        home: of the weights between visits. `"host"`, one copy in host memory, page-locked on CUDA; `"file"`, the
            safetensors files that hold them, and a file without a name for those that no file holds byte for byte,
            written once; `"auto"`, the host where it has room for them and is not the device's own memory, else files.
            What trains is read from the safetensors files until its first update, and then from another file without a
            name: they are never written.
        trained: whether all parameters stream, with their gradients.
        budget_gib: device memory for frozen weights, used by those that are visited soonest. None: as much as a visit
            and the next one take, and none between steps.
        device: that runs the model. None: the one where its weights are, or else the accelerator, if there is one.
        copier: how bytes move. None: side streams on an accelerator, plain copies on the CPU.
        files: safetensors files, or folders of them, where weights may lie. None: the folder that transformers has
            loaded the model from, or the files that it has mapped.
        disk: folder on a local disk for the files without a name. None: the system's for temporary files.

    Raises:
        DiskError: a file of the weights cannot be read or written.
        ValueError: unknown home; negative budget, or one below what stays on the device anyway; no frozen weights;
            sharded ones, or ones made in inference mode; a model split over several devices, or compiled as one region;
            weights that stream already; several ranks with `trained=True`, or quantised weights that train.

    Attributes:
        device: that runs the model.
        home: `"host"` or `"file"`.
        trained: whether weights that train stream.

    Autocast copies a weight of another dtype for each use, and autograd keeps the copy. For linear layers and
    convolutions this object makes the copies, and drops them; in other modules they stay until backward.

    With several ranks, every rank makes one, in the same order; they share the copy in host memory. Cost of a step:
    each weight is brought once in forward and once in backward, and again where it is recomputed; some 0.2 ms of the
    host for each call of a module with its backward.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        home: BaseHome = "auto",
        trained: bool = False,
        budget_gib: float | None = None,
        device: torch.device | str | None = None,
        copier: Copier | None = None,
        files: Iterable[str | os.PathLike[str]] | None = None,
        disk: str | os.PathLike[str] | None = None,
    ) -> None:
        if home not in BASE_HOMES:
            raise ValueError(f"home={home!r} is unknown; use one of {', '.join(BASE_HOMES)}")
        NOT_NEGATIVE.check("budget_gib", budget_gib)
        check_disk(disk)
        _refuse_what_places_weights(model)
        _refuse_streamed(model)
        if trained:
            _refuse_what_cannot_train(model)
        if is_compiled(model):
            raise ValueError(
                "model is compiled as one region, which would need all its weights at once; compile its layers "
                "instead, or compile it after it streams"
            )
        self.device = _device_of(model) if device is None else torch.device(device)
        self._given_copier = copier
        self._copier = copier_for(self.device, purpose="base") if copier is None else copier
        self._model, self.trained, self._disk = model, trained, disk
        # By thread, of the outermost `stream()`. One that was interrupted as it ended may still stand here.
        self._outermost: dict[int, WithStatement] = {}
        self._adopted: list[OffloadedOptimizer] = []
        undo = ModelState(model).put_back
        try:
            with torch.inference_mode(False):  # autograd saves weights in later passes
                self._begin(home, budget_gib, files)
            undo = self.remove  # the memory that the weights had is freed
            return_freed_memory()
            what = "weights" if trained else "frozen weights"
            logger.info("%s: %s stream from %s", what, format_bytes(self._streamed_bytes), self.home)
        except BaseException:  # an interrupt, too
            undo()
            raise

    def adopt(self, optimizer: Optimizer) -> OffloadedOptimizer:
        """Change an optimizer's `step` to visit the weights that train, their gradients and its state.

        Takes the space for all of them at their home.

        Args:
            optimizer: of parameters of the model, or an `OffloadedOptimizer` of such. Its `step`, `state_dict`,
                `load_state_dict` and `add_param_group` are those of the returned object from then on.

        Returns:
            OffloadedOptimizer: with the state of the optimizer at the home of the weights.

        Raises:
            ValueError: made without `trained=True`, or an optimizer that `OffloadedOptimizer` refuses.
            DiskError: the disk has no room.
        """
        if not self.trained:
            raise ValueError("adopt(optimizer) needs StreamedWeights(model, trained=True)")
        adopted = offloaded(optimizer)
        if adopted is None:
            adopted = OffloadedOptimizer(optimizer, self.home, disk=self._disk, copier=self._given_copier)
            adopted.redirect()
        known = set(self._model.parameters())
        parameters = [each for group in adopted.param_groups for each in group["params"]]
        if any(hasattr(each, COMES_AND_GOES) and each not in known for each in parameters):
            raise ValueError(
                "optimizer has weights of two models that stream; give each model an optimizer, or stream one module "
                "that holds both"
            )
        self._follow_gradients()
        self._home.reserve(self.device)
        self._gradients.reserve()
        if adopted.weights is None:
            adopted.weights = TrainedWeights(self._visiting, self._gradients)
            self._adopted.append(adopted)
        return adopted

    @contextmanager
    def stream(self, path: str = "") -> Iterator[None]:
        """Enclose a forward pass and its loss; backward may run inside or afterwards, any number of times.

        Calls of the model work outside as well, but only a pass in here is learned from and fetched ahead.

        Args:
            path: names the way that the pass takes through the model, where that has several, such as generating and
                scoring; each is learned by itself. Passes with gradients are distinguished from others anyway.

        Raises:
            DiskError: a file of the weights has changed.
            RuntimeError: a streamed weight was replaced, cast or moved, or a frozen one unfrozen or written.
        """
        thread = threading.get_ident()
        outermost = self._outermost.get(thread)
        if in_backward() or (outermost is not None and outermost.may_be_running()):
            yield
            return
        self._outermost[thread] = WithStatement.of_caller()
        try:
            with self._pass(path):
                yield
        finally:
            self._outermost.pop(thread, None)

    @contextmanager
    def visit(self, module: nn.Module) -> Iterator[None]:
        """Keep the weights of a module, and of those inside it, on the device, so that any code may read them.

        With `trained=True` it may write them, too: what was written goes home.

        Args:
            module: the model or a part of it.

        Raises:
            RuntimeError: one of them was replaced, cast or moved, or else, where none trains, written or unfrozen:
                `remove()` first.

        Takes device memory for all of them at once, beyond `budget_gib` if need be.
        """
        self._end_interrupted()
        self._home.check()
        with self._visiting.visit(module, WithStatement.of_caller()):
            yield
        self._guards.check()

    def report(self) -> WeightsReport:
        """Return the costs so far."""
        storages, names = self._visiting.storages, self._visiting.names
        staying = storages.resident()
        resident = self._resident | {reason: storages.bytes_of(numbers) for reason, numbers in staying.items()}
        held = sum(num_bytes for is_free, num_bytes in self._sources if not is_free())
        if held:
            resident["held by tensors outside of the model"] = held
        return WeightsReport(
            home=self.home,
            device=str(self.device),
            streamed_bytes=self._streamed_bytes,
            host_bytes=self._home.host_bytes + self._gradients.host_bytes,
            device_bytes=storages.device_bytes,
            peak_device_bytes=storages.peak_device_bytes,
            bytes_to_device=storages.bytes_brought,
            bytes_read=self._home.bytes_read,
            stall_ms=self._copier.stall_ms() + 1e3 * self._home.waited_s,
            resident=resident,
            names=self._names | {reason: tuple(names[each] for each in numbers) for reason, numbers in staying.items()},
            smallest_budget_bytes=storages.visit_bytes,
            trained=self.trained,
            bytes_to_home=sum(each.bytes_to_home for each in self._visiting.found),
            gradient_bytes=(self._gradients.bytes_read, self._gradients.bytes_written),
        )

    def remove(self) -> None:
        """Put all weights, and gradients, onto the device, as ordinary tensors. A second call does nothing.

        Takes device memory for all of them. Graphs of earlier steps can be run no more. An optimizer that was adopted
        keeps the home of its state.
        """
        self._guards.remove()
        self._end_interrupted()
        self._gradients.remove()
        while self._adopted:
            self._adopted.pop().weights = None
        self._visiting.restore()
        _ignore_in_ddp(self._model, set(getattr(self._model, _IGNORED, ())) - self._ignored.keys())
        while self._ignored:
            vars(self._ignored.popitem()[1]).pop("_ddp_ignored", None)
        vars(self._model).pop(_STREAMED, None)

    def __deepcopy__(self, memo: dict[int, object]) -> "StreamedWeights":
        return self

    def _begin(self, home: BaseHome, budget_gib: float | None, files: Iterable[str | os.PathLike[str]] | None) -> None:
        model, disk = self._model, self._disk
        claim_device(model, self._copier)
        return_second_tensors(model)
        chosen = select(model, self.trained)
        weights = PackedWeights(model, exclude=chosen.others, inner_of=stored_tensors)
        self.home: Home = _home_of(home, self.device, weights.num_bytes)
        where = loaded_from(model) if files is None else files
        copier = None if self.device.type == "cpu" and type(self._copier) is SyncCopier else self._copier
        written = BlockHome(self.home, copier, disk, "weights that train and their gradients")
        written.largest_bytes = max((piece.num_bytes for piece in weights.slices), default=0)
        to_write = written if self.trained else None
        self._home = make_home(weights, self.home, self.device, self._copier, where, disk, to_write)
        self._sources = _own_memory(weights)
        weights.drop_sources()
        self._streamed_bytes = weights.num_bytes
        self._resident = chosen.resident_bytes
        self._visiting = Visiting(
            model,
            weights,
            self._home,
            self.device,
            self._copier,
            _budget(budget_gib, chosen),
            repeats=True,
            remedy=_REMEDY_OF_TRAINED if self.trained else _REMEDY_OF_FROZEN,
            remedy_of_writes=REMEDY,
            is_written_home=self.trained,
            what="weight" if self.trained else "frozen weight",
        )
        self._guards = ParameterGuards(
            chosen.streamed,
            self._visiting.at_home,
            self._check_home,
            self._visiting.is_unchanged,
            self._visiting.load if self.trained else None,
            self._visiting.move_home if self.trained and self._home.file_bytes else None,
        )
        self._gradients = Gradients(written, self._visiting.lock)
        self._streamed = {each.parameter for each in chosen.streamed}
        self._names = {reason: tuple(named) for reason, named in chosen.resident.items() if reason != "small"}
        self._visiting.bind()
        others = set(getattr(model, _IGNORED, ()))
        frozen = [each for each in chosen.streamed if not each.parameter.requires_grad]
        self._ignored = {each.name: each.parameter for each in frozen if each.name not in others}
        _ignore_in_ddp(model, others | self._ignored.keys())
        for tensor in chosen.others:
            if tensor.device != self.device:
                tensor.data = tensor.to(self.device)
        self._follow_gradients()  # of parameters where they stay: a simulated one that moves loses its hooks
        setattr(model, _STREAMED, self)

    @contextmanager
    def _pass(self, path: str) -> Iterator[None]:
        self._end_interrupted()
        self._visiting.follow_quantised()
        self._follow_gradients()
        self._guards.check()
        self._home.check()
        trains, has_failed = torch.is_grad_enabled(), True
        begun = self._visiting.begin(f"{'training' if trains else 'evaluation'} {path}")
        try:
            yield
            self._home.check()
            has_failed = False
        finally:
            self._visiting.end(begun, has_failed, trains)

    def _end_interrupted(self) -> None:
        for each in self._adopted:
            if each.weights is not None:
                each.weights.close()

    def _follow_gradients(self) -> None:
        for name, parameter in self._model.named_parameters() if self.trained else ():
            self._gradients.follow(parameter, name, has_home=parameter in self._streamed)

    def _check_home(self) -> None:
        """Write home what is newer on the device, and check that files are as they were."""
        self._end_interrupted()
        self._visiting.flush()
        if self.trained:
            self._home.settle()
        self._home.check()


def streamed_weights_of(model: nn.Module) -> StreamedWeights | None:
    """Return the object by which weights of a model, or of a model inside it, stream, or None if none do."""
    found = (vars(module).get(_STREAMED) for module in model.modules())
    return next((each for each in found if each is not None), None)


def _own_memory(weights: PackedWeights) -> list[tuple[Callable[[], bool], int]]:
    """Return of each storage that holds nothing but one slice of weights whether it is free, and its bytes."""
    reference: Any = StorageWeakRef
    storages = [(memory.untyped_storage(), memory.nbytes) for _, memory in weights.pieces()]
    return [(reference(each).expired, num_bytes) for each, num_bytes in storages if each.nbytes() == num_bytes]


def _device_of(model: nn.Module) -> torch.device:
    weights = next(model.parameters()).device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return weights if weights.type != "cpu" or accelerator is None else accelerator


def _home_of(home: BaseHome, device: torch.device, num_bytes: int) -> Home:
    if home != "auto":
        return home
    backend = backend_of(device)
    return "file" if backend.is_unlimited or 1.1 * num_bytes > backend.free_host_bytes() else "host"


def _budget(budget_gib: float | None, chosen: Selection) -> int:
    if budget_gib is None:
        return 0
    resident_bytes = sum(chosen.resident_bytes.values())
    left = int(budget_gib * GIB) - resident_bytes
    if left < 0:
        reason, named = next(iter(chosen.resident.items()))
        raise ValueError(
            f"budget_gib={budget_gib} is less than the {format_bytes(resident_bytes)} of weights that stay on the "
            f"device anyway, such as {next(iter(named))!r} ({reason}); raise it"
        )
    return left


def _refuse_what_places_weights(model: nn.Module) -> None:
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(places) > 1:
        raise ValueError(
            f"model is split over {len(places)} devices by its device_map, whose own hooks move weights; load it "
            "without one"
        )
    for name, module in model.named_modules():
        if type(module).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine") or isinstance(
            module, DistributedDataParallel
        ):
            raise ValueError(
                f"model{name and '.' + name} is a {type(module).__name__}, which places the weights itself; stream "
                "those of the model inside before it is wrapped"
            )


def _refuse_what_cannot_train(model: nn.Module) -> None:
    if several_ranks():
        raise ValueError(
            "trained=True on several ranks: gradients at their home are not averaged over ranks; use one process, or "
            "FSDP or DeepSpeed"
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and type(parameter) not in PLAIN_TYPES | PARAMETER_TYPES:
            raise ValueError(
                f"trained=True: {name!r} is a {type(parameter).__name__}; only plain weights can train with a home. "
                "Freeze it, or load the model unquantised and unsharded"
            )


def _refuse_streamed(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, COMES_AND_GOES):
            raise ValueError(f"model: {name!r} streams already; use that StreamedWeights, or call its remove() first")


def _ignore_in_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Make DistributedDataParallel leave these weights alone: it would broadcast those that stream."""
    set_ignored: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    set_ignored(model, sorted(names))
