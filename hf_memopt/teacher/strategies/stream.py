"""Streaming: blocks of frozen weights come to the device as a module reads them, and leave when it is done."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_memopt.teacher.packed_weights import PackedWeights, bind, views
from hf_memopt.teacher.streaming.access_trace import Tracer, own_segments
from hf_memopt.teacher.streaming.copy_schedule import StreamPlan, plan_stream, untraced_plan
from hf_memopt.teacher.streaming.ring import Ring
from hf_memopt.transfer import Copier
from hf_memopt.transfer.device_types import readable_in_place
from hf_memopt.units import MIB

logger = logging.getLogger(__name__)


class StreamedWeights:
    """Streams a module's weights through a small ring of device slots while the module runs.

    The first visit in which the module reads weights is watched, and each weight brought as it is read. From then on
    hooks on the modules bring what they read: weights that a visit reads again and again stay until it ends, the others
    pass through the ring, the next block on its way while the present one computes, and weights that are never read
    never travel. Embeddings are not brought: their rows are gathered from host memory.

    Between visits nothing is on the device. Within one, a weight that is not there is read in place, in host memory
    that the device can read: a visit may take any path, and only one that was not watched may be slow.

    Args:
        module: the frozen module.
        weights: its weights, packed.
        master: the bytes that they were packed into, on the host.
        device: where the module runs.
        copier: how bytes move.
        budget_bytes: what the weights may take on the device; see `plan_stream`.

    Raises:
        ValueError: `device` cannot read `master`.
    """

    mode = "stream"

    def __init__(
        self,
        module: nn.Module,
        weights: PackedWeights,
        master: Tensor,
        device: torch.device,
        copier: Copier,
        budget_bytes: int | None = None,
    ) -> None:
        self._module = module
        self._weights = weights
        self._master = master
        self._copier = copier
        self._budget_bytes = budget_bytes
        self._hooks: list[RemovableHandle] = []
        self._home = views(weights.places, master)
        bind(weights.places, self._home)
        in_place = readable_in_place(master, device)
        self._in_place = [views(segment.places, in_place) for segment in weights.segments]
        self._stack = ExitStack()
        self._tracer: Tracer | None = None
        self._visiting = False
        self._position = -1
        self._entered: tuple[int, ...] = ()
        # Needs that are met until blocks that stay are dropped.
        self._settled: set[tuple[int, ...]] = set()
        # The visit that was planned from; None before.
        self._trace: Tracer | None = None
        self._set_plan(untraced_plan(self._sizes()))

    @property
    def host_bytes(self) -> int:
        """The master copy."""
        return self._master.nbytes

    @property
    def device_bytes(self) -> int:
        """What the weights hold on the device now."""
        return self._ring.device_bytes

    @property
    def peak_device_bytes(self) -> int:
        """The most that they held on the device, since streaming was planned."""
        return self._ring.peak_device_bytes

    def prefetch(self) -> None:
        """Start bringing what the next visit reads first: what has to be there before it begins, and one block."""
        for number in (*self._plan.at_arrival, *self._plan.sequence[:1]):
            self._ring.fetch(number)

    def arrive(self) -> None:
        """Begin a visit."""
        self._visiting = True
        bind(self._weights.places, [view for segment in self._in_place for view in segment])
        if self.plan is None:
            self._tracer = Tracer(self._module, self._weights.segments_of, self._enter)
            self._stack.enter_context(self._tracer.running())
        self.prefetch()
        for number in self._plan.at_arrival:
            self._ring.bind(number)

    def leave(self, finished: bool) -> None:
        """End a visit. The first one that was finished, without an exception, and read weights is planned from."""
        self._visiting = False
        self._begin_sequence()
        self._stack.close()
        for number in self._ring.present:
            self._ring.unbind(number)
        bind(self._weights.places, self._home)
        for number in self._ring.present:
            self._ring.drop(number)
        tracer, self._tracer = self._tracer, None
        if finished and tracer is not None and tracer.reads:
            self._trace = tracer
            self.adopt(self.plan_within(self._budget_bytes))

    @property
    def plan(self) -> StreamPlan | None:
        """What visits follow; None before one was watched."""
        return self._plan if self._trace is not None else None

    def plan_within(self, budget_bytes: int | None) -> StreamPlan:
        """The plan for a budget, once a visit was watched."""
        assert self._trace is not None
        segments_of = self._weights.segments_of
        not_seen = {
            name: own_segments(module, segments_of)
            for name, module in self._module.named_modules()
            if name not in self._trace.called and not isinstance(module, nn.Embedding)
        }
        return plan_stream(self._trace.reads, self._sizes(), not_seen, budget_bytes)

    def adopt(self, plan: StreamPlan) -> None:
        """Follow a plan from the next visit on."""
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
        """Give up the device memory and the hooks, between visits."""
        for number in self._ring.present:
            self._ring.drop(number)
        while self._hooks:
            self._hooks.pop().remove()

    def _sizes(self) -> list[int]:
        return [segment.num_bytes for segment in self._weights.segments]

    def _set_plan(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._ring = Ring(
            self._copier, self._master, self._weights.segments, self._in_place, plan.blocks, plan.slot_bytes
        )
        self._begin_sequence()

    def _begin_sequence(self) -> None:
        self._position = -1
        self._entered = ()
        self._settled.clear()

    def _hook(self, needs: tuple[int, ...]) -> Callable[..., None]:
        # A function, so that a deep copy of the module shares it instead of copying the teacher with it.
        def before_forward(module: nn.Module, args: Any) -> None:
            if self._visiting and self._entered is not needs:
                self._enter(needs)

        return before_forward

    def _enter(self, needs: tuple[int, ...]) -> None:
        """Have these blocks on the device, let go of those that nobody expects, and start bringing the next."""
        if needs in self._settled:
            self._entered = needs
            return
        self._entered = ()
        self._follow(needs)
        ahead = self._ahead(needs)
        for number in self._ring.present:
            if number not in needs and number not in ahead and self._is_over(number):
                self._ring.drop(number)
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

    def _is_settled(self, number: int) -> bool:
        return self._plan.blocks[number].stays and self._ring.is_bound(number)

    def _is_over(self, number: int) -> bool:
        leaves_at = self._plan.blocks[number].leaves_at
        return leaves_at is None or leaves_at <= self._position

    def _follow(self, needs: tuple[int, ...]) -> None:
        """Find the place in the expected sequence, from the present one on, then from the beginning."""
        # What stays is expected once, and read many times.
        sought = {number for number in needs if not self._is_settled(number)}
        sequence, present = self._plan.sequence, max(self._position, 0)
        for positions in (range(present, len(sequence)), range(present)):
            for place in positions:
                if sequence[place] in sought:
                    self._position = self._last_of(needs, place)
                    return

    def _last_of(self, needs: tuple[int, ...], place: int) -> int:
        sequence = self._plan.sequence
        while place + 1 < len(sequence) and sequence[place + 1] in needs:
            place += 1
        return place

    def _ahead(self, needs: tuple[int, ...]) -> list[int]:
        """The blocks that are expected next and for which the ring has room beside those that are needed."""
        room = self._plan.num_slots - sum(not self._plan.blocks[number].stays for number in needs)
        ahead: list[int] = []
        for number in self._plan.sequence[self._position + 1 :]:
            if len(ahead) == room or len(ahead) == self._plan.num_slots - 1:
                break
            if number not in needs and number not in ahead and not self._is_settled(number):
                ahead.append(number)
        return ahead
