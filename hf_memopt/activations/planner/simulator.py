"""Simulates a training step whose saved activations are kept, offloaded or recomputed.

The resources are the compute stream and, for each memory below the device, one queue of copies in each direction.
Here a, b and c are offloaded to one memory, with room for one copy in flight and for one prefetch; dots are compute
that waits:

    compute    |save a |save b ....|save c ....|use c  ....|use b  ....|use a
    down               [=== a ====][=== b ====][=== c ====]
    up                                         [=== b ====][=== a ====]
    held: a            aaaaaaaaaaaa                    aaaaaaaaaaaaaaaaaaaaaaaa
          b                    bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
          c                                cccccccccccccccc

Saving b lets a leave, so compute waits for the copy of a. Backward finds c still on its way out and reads it where it
is; c goes when its copy is over. Using c starts the copy of b back, and using b that of a.

Compute is delayed where it needs bytes that are not there, or must free memory whose copy is not over. The simulator
acts in host order, as `offloaded_pass` does, so its peak is exact and its step time a prediction. About 0.4 us for each
save and use.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hf_memopt.activations.planner.profile import Action, EventKind, Profile, added_up, needs_by_backward, reload_order
from hf_memopt.transfer.tier import Tier

_KEEP, _OFFLOAD, _RECOMPUTE = (int(action) for action in Action)
_SAVE, _USE, _FREE, _END_OF_BACKWARD = (int(kind) for kind in EventKind)
_UNSAVED, _ABSENT, _UNDER_WAY, _LEAVING, _RESIDENT, _OVER = range(6)


@dataclass(frozen=True)
class Timeline:
    """The cost of a step; `step_s` is compute, stalls and recomputation together."""

    peak_bytes: int
    step_s: float
    stall_s: float
    recompute_s: float
    reload_order: tuple[int, ...]
    offloaded_bytes: int


def simulate(
    profile: Profile,
    actions: Sequence[int],
    tiers: Sequence[Tier],
    *,
    in_flight_bytes: int,
    prefetch_bytes: int,
    memories: Sequence[int] | None = None,
) -> Timeline:
    """Predict one training step; a ValueError without an action for each storage, or if one cannot be recomputed.

    `memories` has the number of the tier that each storage goes to if it is offloaded; without it that is the first.
    """
    if len(actions) != len(profile.storages):
        raise ValueError(f"actions has {len(actions)} entries for {len(profile.storages)} storages; give one for each")
    memories = memories or bytes(len(actions))
    return _Step(profile, actions, tiers, memories, in_flight_bytes, prefetch_bytes).run()


class _Step:
    """The state of a simulated step. Memory is given up in host order, never because a copy happens to end early.

    Each storage is in one of six states:

        _UNSAVED -> _LEAVING -> _ABSENT -> _UNDER_WAY -> _RESIDENT -> _OVER     offloaded
        _UNSAVED -> _RESIDENT -> _OVER                                          kept
        _ABSENT -> _RESIDENT -> _OVER                                           recomputed

    `_RESIDENT` goes back to `_ABSENT` where a later backward needs the storage again.
    """

    def __init__(
        self,
        profile: Profile,
        actions: Sequence[int],
        tiers: Sequence[Tier],
        memories: Sequence[int],
        in_flight: int,
        prefetch: int,
    ) -> None:
        self.profile, self.actions, self.tiers, self.memories = profile, actions, tiers, memories
        self.sizes, self.storages = profile.sizes, profile.storages
        self.in_flight_bytes, self.prefetch_bytes = in_flight, prefetch
        self.needs_by_backward = needs_by_backward(profile, actions)
        self.total_needs = added_up(self.needs_by_backward)
        self.backward = 0
        # Uses still to come: of moved storages in the backward at work, at whose end they go; of kept ones altogether.
        self.needs = self.needs_by_backward[0].copy()
        for index, storage in enumerate(profile.storages):
            if actions[index] == _KEEP:
                self.needs[index] = self.total_needs[index] + (storage.freed_s is not None)
        self.reload_order = reload_order(profile, actions)
        self.positions = {index: position for position, index in enumerate(self.reload_order)}
        self.bytes_before = list(accumulate((profile.sizes[index] for index in self.reload_order), initial=0))
        # Up to this position in the reload order nothing is left to fetch.
        self.fetched_to = 0
        self.states = [_ABSENT if action == _RECOMPUTE else _UNSAVED for action in actions]
        self.copied_s: dict[int, float] = {}
        self.arrives_s: dict[int, float] = {}
        # Copies from the device whose memory is still held, oldest first.
        self.leaving: deque[int] = deque()
        # Storages whose last use has begun go when time moves on: the node at work still reads them.
        self.ending: list[int] = []
        self.leaving_bytes = self.resident_bytes = self.peak_bytes = self.offloaded_bytes = 0
        self.time = -math.inf
        # `time` is on the clock of the profile; `now_s` is that plus all delays so far.
        self.now_s = self.delay_s = self.recompute_s = 0.0
        # When the queues of each memory have done all that was given to them.
        self.down_free_s, self.up_free_s = [0.0] * len(tiers), [0.0] * len(tiers)

    def run(self) -> Timeline:
        actions, needs, states, ending = self.actions, self.needs, self.states, self.ending
        for time, kind, index in self.profile.events:
            if time != self.time:
                self.now_s = time + self.delay_s
                self.time = time
                if ending:
                    self._free_ending()
            if kind == _USE:
                # The commonest case, without a call.
                if states[index] == _RESIDENT and actions[index] != _OFFLOAD:
                    needs[index] -= 1
                    if not needs[index]:
                        ending.append(index)
                else:
                    self._need(index)
            elif kind == _SAVE:
                # Sources of nothing recomputed have no reader, and are not saved.
                is_needed = needs[index] or self.total_needs[index] or self.storages[index].freed_s is not None
                if is_needed and actions[index] != _RECOMPUTE:
                    self._save(index)
            elif kind == _FREE:
                self._free(index)
            else:
                self._end_backward()
        self.now_s = self.profile.step_s + self.delay_s
        self._free_ending()
        return Timeline(
            peak_bytes=self.peak_bytes,
            step_s=self.profile.step_s + self.delay_s,
            stall_s=self.delay_s - self.recompute_s,
            recompute_s=self.recompute_s,
            reload_order=tuple(self.reload_order),
            offloaded_bytes=self.offloaded_bytes,
        )

    def _free(self, index: int) -> None:
        if self.actions[index] == _KEEP:
            self._count_need(index)
        elif self.actions[index] == _OFFLOAD and self.states[index] == _LEAVING:
            self.leaving_bytes -= self.sizes[index]
            self.states[index] = _RESIDENT
            self.ending.append(index)

    def _end_backward(self) -> None:
        # The next backward brings moved storages anew, if it needs them at all.
        self._free_ending()
        self.backward += 1
        self.fetched_to = 0
        for index, action in enumerate(self.actions):
            if action != _KEEP:
                self.needs[index] = self.needs_by_backward[self.backward][index]

    def _save(self, index: int) -> None:
        num_bytes = self.sizes[index]
        self._occupy(num_bytes)
        if self.actions[index] != _OFFLOAD:
            self.states[index] = _RESIDENT
            return
        memory = self.memories[index]
        begun_s = max(self.now_s, self.down_free_s[memory])
        self.down_free_s[memory] = begun_s + num_bytes / self.tiers[memory].write_bytes_per_s
        self.copied_s[index] = self.down_free_s[memory]
        self.offloaded_bytes += num_bytes
        self.states[index] = _LEAVING
        self.leaving.append(index)
        self.leaving_bytes += num_bytes
        self.fetched_to = 0
        # The oldest goes at this moment, however far its copy has come; the host waits for it if need be.
        while self.leaving_bytes > self.in_flight_bytes:
            self._give_up_oldest()

    def _give_up_oldest(self) -> None:
        index = self.leaving.popleft()
        if self.states[index] != _LEAVING:  # backward has claimed it
            return
        self._wait_until(self.copied_s[index])
        self.states[index] = _ABSENT
        self.fetched_to = 0
        self.leaving_bytes -= self.sizes[index]
        self.resident_bytes -= self.sizes[index]

    def _need(self, index: int) -> None:
        if self.actions[index] == _OFFLOAD:
            self._fetch(index)
        elif self.states[index] == _ABSENT:
            self._rebuild(index)
        self._count_need(index)

    def _rebuild(self, index: int) -> None:
        """Recompute a storage, its recomputed sources first: a depth-first walk without recursion."""
        actions, states, storages = self.actions, self.states, self.storages
        stack = [(index, iter(storages[index].sources))]
        while stack:
            index, sources = stack[-1]
            for source in sources:
                if states[source] == _ABSENT and actions[source] == _RECOMPUTE:
                    stack.append((source, iter(storages[source].sources)))
                    break
                self._need(source)
            else:
                stack.pop()
                self._recompute(index)
                self._free_sources(index)
                if stack:
                    self._count_need(index)

    def _count_need(self, index: int) -> None:
        self.needs[index] -= 1
        if not self.needs[index]:
            self.ending.append(index)

    def _recompute(self, index: int) -> None:
        self._occupy(self.sizes[index])
        self.states[index] = _RESIDENT
        seconds = self.storages[index].recompute_s or 0.0
        self.recompute_s += seconds
        self.delay_s += seconds
        self.now_s += seconds

    def _free_sources(self, index: int) -> None:
        """Drop sources of a storage alone as soon as it has been computed, unless its graph is retained."""
        if self.storages[index].freed_s is not None:
            return
        for source in self.storages[index].sources:
            uses_s = self.storages[source].uses_s
            is_last_need = source in self.ending and not (uses_s and uses_s[-1] == self.time)
            if is_last_need and not self._comes_again(source):
                self.ending.remove(source)
                self._free_now(source)

    def _fetch(self, index: int) -> None:
        if self.states[index] == _LEAVING:  # still here: backward claims it, and nothing comes back
            self.leaving_bytes -= self.sizes[index]
            self.states[index] = _RESIDENT
        elif self.states[index] == _ABSENT:
            self._issue(index)
        if self.prefetch_bytes:
            self._prefetch_after(index)
        if self.states[index] == _UNDER_WAY:
            self._wait_until(self.arrives_s[index])
            self.states[index] = _RESIDENT

    def _prefetch_after(self, index: int) -> None:
        order, bytes_before, states = self.reload_order, self.bytes_before, self.states
        first = self.positions[index] + 1
        position = max(first, self.fetched_to)
        limit = bytes_before[first] + self.prefetch_bytes
        while position < len(order) and bytes_before[position + 1] <= limit:
            if states[order[position]] == _ABSENT:
                self._issue(order[position])
            position += 1
        self.fetched_to = position

    def _issue(self, index: int) -> None:
        num_bytes = self.sizes[index]
        memory = self.memories[index]
        # A copy back waits for the host, for the copies before it, and for its own way out.
        start = max(self.now_s, self.up_free_s[memory], self.copied_s[index])
        self.up_free_s[memory] = start + num_bytes / self.tiers[memory].read_bytes_per_s
        self.arrives_s[index] = self.up_free_s[memory]
        self._occupy(num_bytes)
        self.states[index] = _UNDER_WAY

    def _occupy(self, num_bytes: int) -> None:
        self.resident_bytes += num_bytes
        if self.resident_bytes > self.peak_bytes:
            self.peak_bytes = self.resident_bytes

    def _wait_until(self, time_s: float) -> None:
        if time_s > self.now_s:
            self.delay_s += time_s - self.now_s
            self.now_s = time_s

    def _free_ending(self) -> None:
        for index in self.ending:
            self._free_now(index)
        self.ending.clear()

    def _free_now(self, index: int) -> None:
        # An offload still running reads the memory.
        if index in self.copied_s:
            self._wait_until(self.copied_s[index])
        self.states[index] = _ABSENT if self._comes_again(index) else _OVER
        self.resident_bytes -= self.sizes[index]

    def _comes_again(self, index: int) -> bool:
        """Return whether the graph was retained for a later backward."""
        later = self.needs_by_backward[self.backward + 1 :]
        return self.actions[index] != _KEEP and any(needs[index] for needs in later)
