"""All plans of a small profile, but for those that a bound shows to be no better than what was found already."""

from dataclasses import dataclass

from hf_memopt.activations.plan_front import Trials, Window
from hf_memopt.activations.timeline import Action

# A plan that cannot be faster than a known one by more than this is not simulated.
_STEP_TOLERANCE = 5e-3


@dataclass(frozen=True)
class _Partial:
    """Lower bounds for all plans that share the actions of the first storages."""

    live_bytes: list[int]  # at each moment of the profile
    recompute_s: float
    offloaded_bytes: int


def enumerate_plans(trials: Trials) -> None:
    """Branch and bound over the front of peak and step time, the largest storages first."""
    for window in trials.windows:
        _Enumeration(trials, window).run()


class _Enumeration:
    def __init__(self, trials: Trials, window: Window) -> None:
        self._trials, self._window = trials, window
        profile = trials.profile
        self._storages = profile.storages
        # Each save is a moment of its own, because what was saved before it may be gone; uses at one time share theirs.
        moments = sorted({(time, is_use, 0 if is_use else index) for time, is_use, index in profile.events})
        place = {moment: position for position, moment in enumerate(moments)}
        self._saved = [place[s.saved_at_s, False, index] for index, s in enumerate(self._storages)]
        self._used = [
            (place[min(s.uses_s), True, 0], place[max(s.uses_s), True, 0]) if s.uses_s else None for s in self._storages
        ]
        self._num_moments = len(moments)
        self._order = sorted(range(len(self._storages)), key=lambda index: -self._storages[index].num_bytes)
        saves = [storage.saved_at_s for storage in self._storages]
        needs = [time for storage in self._storages for time in storage.uses_s]
        self._forward_s = max(saves, default=0.0) - min(saves, default=0.0)
        self._backward_s = max(needs, default=0.0) - min(needs, default=0.0)

    def run(self) -> None:
        live = [0] * self._num_moments
        for storage, used in zip(self._storages, self._used, strict=True):
            if used is not None:
                for position in range(used[0], used[1] + 1):
                    live[position] += storage.num_bytes
        self._descend(bytearray(len(self._storages)), 0, _Partial(live, 0.0, 0))

    def _descend(self, actions: bytearray, depth: int, partial: _Partial) -> None:
        if depth == len(self._order):
            self._trials.attempt(bytes(actions), self._window)
            return
        index = self._order[depth]
        for action in Action:
            if action == Action.RECOMPUTE and self._storages[index].recompute_s is None:
                continue
            further = self._with_action(partial, index, action)
            if self._trials.num_left and not self._beaten(further):
                actions[index] = action
                self._descend(actions, depth + 1, further)

    def _with_action(self, partial: _Partial, index: int, action: Action) -> _Partial:
        storage, used = self._storages[index], self._used[index]
        if used is None:  # whether it is needed at all depends on others
            return partial
        if action == Action.RECOMPUTE:
            recompute_s = partial.recompute_s + (storage.recompute_s or 0.0)
            return _Partial(partial.live_bytes, recompute_s, partial.offloaded_bytes)
        live = partial.live_bytes.copy()
        held_until = used[0] if action == Action.KEEP else self._saved[index] + 1
        for position in range(self._saved[index], held_until):
            live[position] += storage.num_bytes
        offloaded = storage.num_bytes if action == Action.OFFLOAD else 0
        return _Partial(live, partial.recompute_s, partial.offloaded_bytes + offloaded)

    def _beaten(self, partial: _Partial) -> bool:
        step_s = self._trials.profile.step_s + self._forward_stall_s(partial) + self._backward_delay_s(partial)
        return self._trials.front.beats(max(partial.live_bytes, default=0), step_s, _STEP_TOLERANCE)

    def _forward_stall_s(self, partial: _Partial) -> float:
        """What is not in flight at the end was copied; with nothing in flight, compute waited all the time."""
        copies_s = self._given_up_bytes(partial) / self._trials.link.to_host_bytes_per_s
        return max(0.0, copies_s - self._forward_s) if self._window.in_flight_fraction else copies_s

    def _backward_delay_s(self, partial: _Partial) -> float:
        """All that was given up comes back, during compute only as far as it is prefetched."""
        reloads_s = self._given_up_bytes(partial) / self._trials.link.to_device_bytes_per_s
        if self._window.prefetch_storages:
            return max(partial.recompute_s, reloads_s - self._backward_s)
        return partial.recompute_s + reloads_s

    def _given_up_bytes(self, partial: _Partial) -> float:
        return partial.offloaded_bytes * (1 - self._window.in_flight_fraction)
