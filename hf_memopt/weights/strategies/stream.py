"""Streaming: blocks of frozen weights come to the device as they are read, and are evicted when that is over."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_memopt.transfer import Copier
from hf_memopt.units import MIB
from hf_memopt.weights.homes import WeightsHome
from hf_memopt.weights.packed_weights import PackedWeights, bind
from hf_memopt.weights.strategies.placement import WeightPlacement
from hf_memopt.weights.streaming.absent_reads import AbsentReads, placeholders
from hf_memopt.weights.streaming.access_trace import Tracer, own_slices
from hf_memopt.weights.streaming.copy_schedule import StreamPlan, plan_stream, untraced_plan
from hf_memopt.weights.streaming.ring import Ring

logger = logging.getLogger(__name__)


class StreamedVisits(WeightPlacement):
    """Streams a module's weights through a small ring of device slots while the module runs.

    The first visit in which the module reads weights is traced, and each weight is brought as it is read. From then on
    hooks on the modules bring their weights: those that a visit reads again and again stay until it ends, the others
    pass through the ring, the next block on its way while the present one computes, and unread weights never travel.
    Embeddings are not brought: their rows are gathered from their home.

    Between visits nothing is on the device. Within one, an absent weight is read in place, at a home that the device
    can read: a visit may take any path, and only an untraced one may be slow. From any other home it is brought when an
    operator reads it (see `AbsentReads`). A ValueError says that the home has to be readable and is not.

    For `budget_bytes` see `plan_stream`.
    """

    mode = "stream"

    def __init__(
        self,
        module: nn.Module,
        weights: PackedWeights,
        home: WeightsHome,
        device: torch.device,
        copier: Copier,
        budget_bytes: int | None,
        reason: str,
    ) -> None:
        self.reason = reason
        self.host_bytes = home.host_bytes
        self._module = module
        self._weights = weights
        self._home = home
        self._copier = copier
        self._budget_bytes = budget_bytes
        self._hooks: list[RemovableHandle] = []
        # A weight is bound to one of three views: of its home between visits; within one, of its slot on the device if
        # it has been brought, and else of its home as the device sees it, or of a placeholder.
        self._home_views = [view for piece in home.views for view in piece]
        bind(weights.offsets, self._home_views)
        in_place = home.in_place(device)
        self._in_place = placeholders(weights.slices, copier) if in_place is None else in_place
        self._reads_absent = in_place is None
        # Ends the watching of a visit.
        self._stack = ExitStack()
        self._tracer: Tracer | None = None
        # The visit that was planned from.
        self._trace: Tracer | None = None
        self._visiting = False
        self._set_plan(untraced_plan(self._sizes()))

    @property
    def device_bytes(self) -> int:
        return self._ring.device_bytes

    @property
    def peak_device_bytes(self) -> int:
        return self._ring.peak_device_bytes

    def predictions(self) -> dict[str, float | None]:
        return {} if self.plan is None else {"predicted_device_bytes": self.plan.device_bytes}

    def prefetch(self) -> None:
        """Start bringing the weights due before the next visit begins, and one block."""
        for number in (*self._plan.at_start, *self._plan.sequence[:1]):
            self._ring.fetch(number)

    def onload(self) -> None:
        self._home.check()
        self._visiting = True
        bind(self._weights.offsets, [view for piece in self._in_place for view in piece])
        if self._reads_absent:
            self._stack.enter_context(self._watch_absent())
        if self.plan is None:
            self._tracer = Tracer(self._module, self._weights.slices_of, self._enter)
            self._stack.enter_context(self._tracer.running())
        self.prefetch()
        for number in self._plan.at_start:
            self._ring.bind(number)

    def evict(self, finished: bool) -> None:
        """End a visit. The first finished one, without an exception, that read weights is planned from."""
        self._visiting = False
        self._restart_sequence()
        self._stack.close()
        # All are bound to the host before any slot is given up: if that fails, the module is right all the same.
        for number in self._ring.present:
            self._ring.unbind(number)
        bind(self._weights.offsets, self._home_views)
        for number in self._ring.present:
            self._ring.evict(number)
        tracer, self._tracer = self._tracer, None
        if finished and tracer is not None and tracer.reads:
            self._trace = tracer
            self.adopt(self.plan_within(self._budget_bytes))
        if finished:
            self._home.check()

    @property
    def plan(self) -> StreamPlan | None:
        """The plan that visits follow; None before one was traced."""
        return self._plan if self._trace is not None else None

    def plan_within(self, budget_bytes: int | None) -> StreamPlan:
        assert self._trace is not None
        slices_of = self._weights.slices_of
        # Uncalled modules get hooks too, should a later visit call them.
        not_called = {
            name: own_slices(module, slices_of)
            for name, module in self._module.named_modules()
            if name not in self._trace.called and not isinstance(module, nn.Embedding)
        }
        return plan_stream(self._trace.reads, self._sizes(), not_called, budget_bytes)

    def adopt(self, plan: StreamPlan) -> None:
        self.close()
        self._set_plan(plan)
        modules = dict(self._module.named_modules())
        for name, needs in plan.needs.items():
            self._hooks.append(modules[name].register_forward_pre_hook(self._hook(needs)))
        logger.debug(
            "teacher: streams %d blocks; %.1f MiB stay for a visit, %d slots of %.1f MiB",
            len(set(plan.sequence)),
            plan.hot_bytes / MIB,
            plan.num_slots,
            plan.slot_bytes / MIB,
        )

    def close(self) -> None:
        """Give up device memory and hooks, between visits."""
        for number in self._ring.present:
            self._ring.evict(number)
        while self._hooks:
            self._hooks.pop().remove()

    def _sizes(self) -> list[int]:
        return [piece.num_bytes for piece in self._weights.slices]

    def _set_plan(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._block_of = {index: number for number, block in enumerate(plan.blocks) for index in block.slices}
        self._ring = Ring(self._copier, self._home, self._weights.slices, self._in_place, plan.blocks, plan.slot_bytes)
        self._restart_sequence()

    def _restart_sequence(self) -> None:
        # Place in the plan's sequence of blocks; -1 before its first block.
        self._position = -1
        # Blocks of the module that ran last: a hook that needs the same has nothing to do.
        self._entered: tuple[int, ...] = ()
        # Needs of hot blocks alone that are on the device: met until one of these blocks is evicted.
        self._settled: set[tuple[int, ...]] = set()

    def _hook(self, needs: tuple[int, ...]) -> Callable[..., None]:
        # A function, so that a deep copy of the module shares it instead of copying the teacher. The plan has one tuple
        # for equal needs, which allows comparison by identity.
        def before_forward(module: nn.Module, args: Any) -> None:
            if self._visiting and self._entered is not needs:
                self._enter(needs)

        return before_forward

    def _enter(self, needs: tuple[int, ...]) -> None:
        """Have these blocks on the device; evicting comes first, so that the next blocks get that memory."""
        if needs in self._settled:
            self._entered = needs
            return
        # If a copy fails below, the same module must not find its needs met.
        self._entered = ()
        self._advance(needs)
        ahead = self._ahead(needs)
        for number in self._ring.present:
            if number not in needs and number not in ahead and self._is_over(number):
                self._ring.evict(number)
                # Modules that counted on this hot block have to look again.
                if self._plan.blocks[number].stays:
                    self._settled.clear()
        for number in needs:
            self._ring.fetch(number)
            self._ring.bind(number)
        for number in ahead:
            self._ring.fetch(number)
        self._entered = needs
        if all(self._plan.blocks[number].stays for number in needs):
            self._settled.add(needs)

    def _watch_absent(self) -> AbsentReads:
        at_home = {id(each.tensor): view for each, view in zip(self._weights.offsets, self._home_views, strict=True)}
        return AbsentReads(self._weights.slices_of, at_home, self._absent, self._bring)

    def _absent(self, slices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(index for index in slices if not self._ring.is_bound(self._block_of[index]))

    def _bring(self, slices: tuple[int, ...]) -> None:
        """Have slices on the device beside all that is there: the running module may go on to read that."""
        for number in dict.fromkeys(self._block_of[index] for index in slices):
            self._ring.fetch(number)
            self._ring.bind(number)

    def _is_settled(self, number: int) -> bool:
        return self._plan.blocks[number].stays and self._ring.is_bound(number)

    def _is_over(self, number: int) -> bool:
        evict_at = self._plan.blocks[number].evict_at
        return evict_at is None or evict_at <= self._position

    def _advance(self, needs: tuple[int, ...]) -> None:
        """Move to the place in the sequence where these blocks are expected next, from its start if need be."""
        # A hot block is in the sequence once, however often it is read: if present, it tells nothing about the place.
        sought = {number for number in needs if not self._is_settled(number)}
        sequence, present = self._plan.sequence, max(self._position, 0)
        for place in (*range(present, len(sequence)), *range(present)):
            if sequence[place] in sought:
                self._position = self._last_of(needs, place)
                return

    def _last_of(self, needs: tuple[int, ...], place: int) -> int:
        sequence = self._plan.sequence
        while place + 1 < len(sequence) and sequence[place + 1] in needs:
            place += 1
        return place

    def _ahead(self, needs: tuple[int, ...]) -> list[int]:
        """Return the blocks expected next for which the ring has room beside the needed ones."""
        room = self._plan.num_slots - sum(not self._plan.blocks[number].stays for number in needs)
        ahead: list[int] = []
        for number in self._plan.sequence[self._position + 1 :]:
            if len(ahead) == room or len(ahead) == self._plan.num_slots - 1:
                break
            if number not in needs and number not in ahead and not self._is_settled(number):
                ahead.append(number)
        return ahead
