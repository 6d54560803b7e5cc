"""Frozen weights that live in host memory or in files, and visit the device in forward and backward."""

import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_memopt.autograd_state import COMES_AND_GOES, in_backward
from hf_memopt.ranges import NOT_NEGATIVE
from hf_memopt.transfer import Copier, copier_for
from hf_memopt.transfer.backends import backend_of
from hf_memopt.transfer.file_reader import BlockInFiles
from hf_memopt.transfer.host_memory import return_freed_memory
from hf_memopt.transfer.scratch_file import check_disk
from hf_memopt.units import GIB, format_bytes, format_gib
from hf_memopt.weights.homes import FileHome, HostHome, WeightsHome
from hf_memopt.weights.packed_weights import PackedWeights
from hf_memopt.weights.quantised import claim_device, is_quantised, stored_tensors
from hf_memopt.weights.residency.backward_visits import OpenVisits
from hf_memopt.weights.residency.guards import ParameterGuards
from hf_memopt.weights.residency.resident_set import ResidentSet
from hf_memopt.weights.residency.selection import is_compiled, select, visits_of
from hf_memopt.weights.residency.storages import StreamedStorage
from hf_memopt.weights.residency.units import TableAtHome, Unit
from hf_memopt.weights.shared_memory import refuse_different, several_ranks, share
from hf_memopt.weights.streaming.access_trace import Tracer
from hf_memopt.weights.weight_files import in_files, loaded_from

logger = logging.getLogger(__name__)

BaseHome = Literal["auto", "host", "file"]
BASE_HOMES: tuple[str, ...] = get_args(BaseHome)
# The attribute of a model that holds the object by which its weights stream.
_STREAMED = "_hf_memopt_streamed_weights"


@dataclass(frozen=True)
class WeightsReport:
    """The cost of streamed weights; prints as text. Bytes and times are totals since they began to stream.

    Attributes:
        home: `"host"` or `"file"`.
        device: that runs the model.
        streamed_bytes: weights that stream.
        host_bytes: host memory of their copy, which all ranks of a machine share; with files, of the memory that reads
            pass through.
        device_bytes: device memory of streamed weights now.
        peak_device_bytes: its peak.
        bytes_to_device: copied, or read, to the device.
        bytes_read: from files, without rows of embeddings.
        stall_ms: time for which compute waited for copies, and the host for reads of files.
        resident: by reason, the bytes of frozen weights that stay on the device.
        names: by reason, the names of those that would stream otherwise.
        smallest_budget_bytes: device memory that the visits of a step need; None before the first step.
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

    def __str__(self) -> str:
        lines = [
            f"frozen weights: {format_bytes(self.streamed_bytes)} stream from "
            f"{'their files' if self.home == 'file' else 'host memory'} to {self.device}",
            f"  {self.device}: {format_bytes(self.device_bytes)} now, {format_bytes(self.peak_device_bytes)} at most; "
            f"host memory: {format_bytes(self.host_bytes)}",
            f"  brought: {format_bytes(self.bytes_to_device)}, of these from files {format_bytes(self.bytes_read)}; "
            f"waited {self.stall_ms:.1f} ms",
        ]
        for reason, num_bytes in self.resident.items():
            first, *others = self.names.get(reason, ("",))
            named = f": {first}" if first else ""
            more = f" and {len(others)} more" if others else ""
            lines.append(f"  stays: {format_bytes(num_bytes)}, {reason}{named}{more}")
        return "\n".join(lines)


class StreamedWeights:
    """Has the frozen weights of a model visit the device, in forward and backward, so that they take little of it.

    Gradients are those of the resident run, bit for bit. Each module's call brings the weights that it reads, and so
    does autograd before it runs the nodes of that call; they are dropped when that is over. The order of visits is
    learned in the first step. From then on the next weights are on their way while the present ones compute. Nothing is
    written back. It needs no checkpointing and goes with both kinds.

    Make it before a `Trainer`, an optimizer or `DistributedDataParallel` gets the model: those would move all weights
    to the device. The weights are on `device` from then on, as far as anybody can see, and others follow them there.

    Args:
        model: its parameters without `requires_grad` stream, in modules of any class. The smallest, one per cent of the
            bytes at most, stay on the device. Rows of embeddings are looked up at home.
        home: of the weights between visits. `"host"`, one copy in host memory, page-locked on CUDA; `"file"`, the
            safetensors files that hold them, and a file without a name for those that no file holds byte for byte,
            written once; `"auto"`, the host where it has room for them and is not the device's own memory, else files.
        budget_gib: device memory for frozen weights. What is left of it beside the visits keeps the weights that are
            visited most often. None keeps none.
        device: that runs the model. None: the one where its weights are, or else the accelerator, if there is one.
        copier: how bytes move. None: side streams on an accelerator, plain copies on the CPU.
        files: safetensors files, or folders of them, where weights may lie. None: the folder that transformers has
            loaded the model from, or the files that it has mapped.
        disk: folder on a local disk for the weights that no such file holds. None: the system's for temporary files.

    Raises:
        DiskError: a file of the weights cannot be read or written.
        ValueError: unknown home; negative budget, or one below what stays on the device anyway; no frozen weights;
            sharded ones, or a model split over several devices; a model compiled as one region; weights that stream
            already.

    Autocast copies a weight of another dtype for each use, and autograd keeps the copy. For linear layers and
    convolutions this object makes the copies, and drops them; in other modules they stay until backward.

    With several ranks, every rank makes one, in the same order; they share the copy in host memory. Cost of a step:
    each weight is brought once in forward and once in backward, and again where it is recomputed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        home: BaseHome = "auto",
        budget_gib: float | None = None,
        device: torch.device | str | None = None,
        copier: Copier | None = None,
        files: Iterable[str | os.PathLike[str]] | None = None,
        disk: str | os.PathLike[str] | None = None,
    ) -> None:
        if home not in BASE_HOMES:
            raise ValueError(f"home={home!r} is unknown; use one of {', '.join(BASE_HOMES)}")
        NOT_NEGATIVE.check("budget_gib", budget_gib)
        if disk is not None:
            check_disk(disk)
        _refuse_what_places_weights(model)
        _refuse_streamed(model)
        self.device = _device_of(model) if device is None else torch.device(device)
        self._copier = copier_for(self.device, purpose="base") if copier is None else copier
        claim_device(model, self._copier)
        chosen = select(model)
        weights = PackedWeights(model, exclude=chosen.others, inner_of=stored_tensors)
        self._home_name = _home_of(home, self.device, weights.num_bytes)
        self._files: BlockInFiles | None = None
        self._home = self._make_home(weights, loaded_from(model) if files is None else files, disk)
        weights.drop_sources()
        self._streamed_bytes = weights.num_bytes
        storages = [StreamedStorage(piece, self._home, self.device, self._copier) for piece in weights.slices]
        self._storages = ResidentSet(storages, self._copier)
        at_home = {
            id(each.tensor): view
            for piece, values in zip(weights.slices, self._home.views, strict=True)
            for each, view in zip(piece.offsets, values, strict=True)
        }
        self._model, self._slices_of = model, weights.slices_of
        self._open_visits = OpenVisits(self._storages.drop_ahead)
        self._guards = ParameterGuards(model, chosen.streamed, at_home)
        self._small_bytes = chosen.small_bytes
        # Of the largest part of a quantised weight.
        self._numbers = {each.name: weights.slices_of[id(each.parameter)][0] for each in chosen.streamed}
        self._budget_bytes = _budget(budget_gib, chosen.small_bytes)
        self._quantised = {
            each.parameter: [_place_of(tensor, storages) for tensor in stored_tensors(each.name, each.parameter)]
            for each in chosen.streamed
            if is_quantised(each.parameter)
        }
        self._units: dict[nn.Module, Unit | TableAtHome] = {}
        self._add_units(at_home)
        self._known: set[str] = set()
        self._has_chosen = False
        # Storages whose reads nothing announced, and the number of backward passes before the one that they wait for.
        self._held: list[int] = []
        self._held_since: int | None = None
        self._depth = 0
        self._has_failed = False
        _ignore_in_ddp(model, [each.name for each in chosen.streamed])
        for tensor in chosen.others:
            if tensor.device != self.device:
                tensor.data = tensor.to(self.device)
        setattr(model, _STREAMED, self)
        return_freed_memory()
        logger.info("frozen weights: %s stream from %s", format_bytes(weights.num_bytes), self._home_name)

    @contextmanager
    def stream(self, path: str = "") -> Iterator[None]:
        """Enclose a forward pass and its loss; backward may run inside or afterwards, any number of times.

        Calls of the model work outside as well, but only a pass in here is learned from and fetched ahead.

        Args:
            path: names the way that the pass takes through the model, where that has several, such as generating and
                scoring; each is learned by itself. Passes with gradients are distinguished from others anyway.

        Raises:
            DiskError: a file of the weights has changed.
            RuntimeError: a streamed weight was unfrozen, replaced, written, cast or moved.
        """
        self._depth += 1
        try:
            if self._depth > 1 or in_backward():
                yield
                return
            trains = torch.is_grad_enabled()
            kind = f"{'training' if trains else 'evaluation'} {path}"
            self._begin(kind, trains)
            if kind in self._known or any(map(is_compiled, self._model.modules())):
                yield
            else:
                with self._learning(kind):
                    yield
                self._held_since = self._open_visits.num_ended if trains else None
            self._home.check()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._depth -= 1

    def report(self) -> WeightsReport:
        """Return the costs so far."""
        waited_s = 0.0 if self._files is None else self._files.waited_s
        return WeightsReport(
            home=self._home_name,
            device=str(self.device),
            streamed_bytes=self._streamed_bytes,
            host_bytes=self._home.host_bytes,
            device_bytes=self._storages.device_bytes,
            peak_device_bytes=self._storages.peak_device_bytes,
            bytes_to_device=self._storages.bytes_brought,
            bytes_read=0 if self._files is None else self._files.bytes_read,
            stall_ms=self._copier.stall_ms() + 1e3 * waited_s,
            resident=({"small": self._small_bytes} if self._small_bytes else {}) | self._storages.resident_bytes(),
            names=self._names_of_resident(),
            smallest_budget_bytes=self._storages.visit_bytes,
        )

    def remove(self) -> None:
        """Put all weights onto the device, as ordinary parameters. A second call does nothing.

        Takes device memory for all of them. Graphs of earlier steps can be run no more.
        """
        while self._units:
            self._units.popitem()[1].remove()
        self._guards.remove()
        self._storages.restore()
        vars(self._model).pop(_STREAMED, None)

    def __deepcopy__(self, memo: dict[int, object]) -> "StreamedWeights":
        return self

    def _begin(self, kind: str, trains: bool) -> None:
        self._has_failed |= self._open_visits.close_all()
        if self._held_since != self._open_visits.num_ended:
            for number in self._held:
                self._storages.leave((number,))
            self._held.clear()
        for parameter, inner in self._quantised.items():
            for (storage, place), tensor in zip(inner, stored_tensors("", parameter), strict=True):
                if storage.tensors[place] is not tensor:
                    storage.follow(place, tensor)
        self._guards.check(self._is_bound)
        self._home.check()
        expected = self._storages.begin(kind, self._has_failed)
        self._has_failed = False
        if trains and expected and self._budget_bytes is not None and not self._has_chosen:
            self._has_chosen = True
            self._storages.keep_most_visited(expected, self._budget_bytes)

    @contextmanager
    def _learning(self, kind: str) -> Iterator[None]:
        """Watch which weights are read by others than their own modules, and bring those too.

        They stay until a backward pass has visited weights, whether gradients were recorded or not: the forward of a
        custom function has them off, and its backward reads the weights again.
        """
        tracer = Tracer(self._model, self._slices_of, self._before_read)
        with tracer.running():
            yield
        self._known.add(kind)
        modules = dict(self._model.named_modules())
        more: dict[nn.Module, dict[int, None]] = defaultdict(dict)
        for read in tracer.reads:
            if read.module is None:
                self._keep(read.slices)
            elif not isinstance(modules[read.module], nn.Embedding):
                more[modules[read.module]].update(dict.fromkeys(read.slices))
        for module, slices in more.items():
            self._extend(module, slices)

    def _before_read(self, slices: tuple[int, ...]) -> None:
        for number in slices:
            if not self._storages.is_used(number):
                self._storages.enter((number,))
                self._held.append(number)

    def _keep(self, slices: Iterable[int]) -> None:
        """Have weights stay that are read outside of all modules, where nothing announces the reads."""
        for number in set(slices).intersection(self._held):
            self._held.remove(number)  # its visit is never left
            self._storages.keep(number, "read outside of the model's modules")

    def _extend(self, module: nn.Module, slices: Iterable[int]) -> None:
        unit = self._units.get(module)
        visit = unit.visit if isinstance(unit, Unit) else ()
        wanted = tuple(dict.fromkeys((*visit, *slices)))
        # An enclosing region brings what the modules inside read.
        if wanted == visit or not any(number in self._held for number in slices):
            return
        if unit is not None:
            unit.remove()
        self._units[module] = Unit(module, wanted, self._storages, self._open_visits)

    def _names_of_resident(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for name, number in self._numbers.items():
            if number in self._storages.reasons:
                found.setdefault(self._storages.reasons[number], []).append(name)
        return {reason: tuple(names) for reason, names in found.items()}

    def _add_units(self, at_home: dict[int, Tensor]) -> None:
        in_place = self._readable_in_place()
        for module, visit in visits_of(self._model, self._slices_of).items():
            if isinstance(module, nn.Embedding):
                key = id(module.weight)
                storage = self._storages.storages[visit[0]]
                self._units[module] = TableAtHome(module, storage, in_place.get(key), at_home[key])
            elif module is self._model and is_compiled(module):
                raise ValueError(
                    "model is compiled as one region, which would need all its weights at once; compile its layers "
                    "instead, or compile it after it streams"
                )
            else:
                self._units[module] = Unit(module, visit, self._storages, self._open_visits)

    def _readable_in_place(self) -> dict[int, Tensor]:
        """Return by the id of a weight its values at home as the device reads them; none where it cannot."""
        try:
            values = self._home.in_place(self.device)
        except ValueError:
            values = None
        if values is None:
            return {}
        return {
            id(tensor): view
            for storage, views in zip(self._storages.storages, values, strict=True)
            for tensor, view in zip(storage.tensors, views, strict=True)
        }

    def _is_bound(self, parameter: nn.Parameter) -> bool:
        return all(self._storages.storages[number].is_bound() for number in self._slices_of[id(parameter)])

    def _make_home(
        self,
        weights: PackedWeights,
        files: Iterable[str | os.PathLike[str]] | None,
        disk: str | os.PathLike[str] | None,
    ) -> WeightsHome:
        simulated = backend_of(self.device).home_in_files
        if self._home_name == "file" and simulated is not None:
            home: WeightsHome = simulated(weights, self.device, self._copier)
            return home
        if self._home_name == "file":
            if several_ranks():
                refuse_different(weights)
            self._files = in_files(weights, files, Path(tempfile.gettempdir() if disk is None else disk))
            return FileHome(weights, self._files, None if self.device.type == "cpu" else self._copier)
        if several_ranks():
            master = share(weights, self.device)
        else:
            master = self._copier.empty_host(weights.num_bytes)
            weights.pack(master)
        return HostHome(weights, master, self._copier)


def streamed_weights_of(model: nn.Module) -> StreamedWeights | None:
    """Return the object by which weights of a model, or of a model inside it, stream; None if none do."""
    found = (vars(module).get(_STREAMED) for module in model.modules())
    return next((each for each in found if each is not None), None)


def _place_of(tensor: Tensor, storages: Iterable[StreamedStorage]) -> tuple[StreamedStorage, int]:
    return next(
        (storage, place) for storage in storages for place, each in enumerate(storage.tensors) if each is tensor
    )


def _device_of(model: nn.Module) -> torch.device:
    weights = next(model.parameters()).device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return weights if weights.type != "cpu" or accelerator is None else accelerator


def _home_of(home: BaseHome, device: torch.device, num_bytes: int) -> str:
    if home != "auto":
        return home
    backend = backend_of(device)
    return "file" if backend.is_unlimited or 1.1 * num_bytes > backend.free_host_bytes() else "host"


def _budget(budget_gib: float | None, small_bytes: int) -> int | None:
    if budget_gib is None:
        return None
    left = int(budget_gib * GIB) - small_bytes
    if left < 0:
        raise ValueError(
            f"budget_gib={budget_gib} is less than the {format_gib(small_bytes)} of small weights that stay on the "
            "device; raise it"
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


def _refuse_streamed(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, COMES_AND_GOES):
            raise ValueError(f"model: {name!r} streams already; use that StreamedWeights, or call its remove() first")


def _ignore_in_ddp(model: nn.Module, names: list[str]) -> None:
    """Have DistributedDataParallel leave streamed weights alone: it would broadcast placeholders."""
    ignored = {*names, *getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
    set_ignored: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    set_ignored(model, sorted(ignored))
