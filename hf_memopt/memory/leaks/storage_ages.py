"""Ages of live storages, which betray a leak."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt.memory.leaks.live_storages import WITH_GRAPH, live_storages
from hf_memopt.transfer.host_arena import HostArena, HostHoldings

# Share of the tested steps that must leave something. By chance, with probability 1/2 in each of 30 steps, that would
# happen with probability 0.003 (one-sided sign test).
_LEAKY_SHARE = 0.75
_COUNTING_DEVICES = ("cuda", "xpu")


class _Birth(NamedTuple):
    """When a storage was first seen. The weak reference also reserves its address: see `_forget_dead`."""

    storage: StorageWeakRef
    step: int
    num_bytes: int
    has_graph: bool


class _Look(NamedTuple):
    step: int
    unreached_bytes: int
    offload: HostHoldings


class StorageAges:
    """Tests whether nearly every one of the last steps left something that is still alive.

    In a sound run, everything alive was made at the start or in the last few steps. Total live bytes would not do: they
    also grow when optimizer state is made late, when a cache fills up, in a longer batch, or in an evaluation.

        steps:  1 … 8 | 9 ………………… 38 | 39 … 46
                start |    tested    | in flight

    Tensors of samples in flight may be in use still, as prefetched batches are. Autograd graphs count at any size.
    `unreached_bytes` measures an accelerator's allocator beyond the given tensors; growth of that is a leak too.
    """

    def __init__(
        self,
        num_tested: int,
        num_in_flight: int,
        min_bytes_per_step: int,
        unreached_bytes: Callable[[list[Tensor]], int] | None,
    ) -> None:
        self._num_tested = num_tested
        self._min_bytes_per_step = min_bytes_per_step
        self._measure_unreached = unreached_bytes
        self.counts_allocator = unreached_bytes is not None
        self._births: dict[int, _Birth] = {}
        # One more than the samples, as growth is measured between two of them.
        self._looks: deque[_Look] = deque(maxlen=num_tested + num_in_flight + 1)

    def sample(self, step: int) -> None:
        """Look at the tensors alive after `step`, which must grow from call to call. Costs one `live_storages`."""
        held = live_storages()
        self._forget_dead()
        for address, items in held.items():
            if address not in self._births:
                storage = items[0].tensor.untyped_storage()
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._births[address] = _Birth(weak, step, storage.nbytes(), items[0].kind == WITH_GRAPH)
        measure = self._measure_unreached
        unreached_bytes = measure([items[0].tensor for items in held.values()]) if measure else 0
        self._looks.append(_Look(step, unreached_bytes, HostArena.of_process()))

    def is_leaking(self) -> bool:
        graphs = {birth.step for birth in self._births.values() if birth.has_graph}
        return (
            _mostly(rate >= self._min_bytes_per_step for rate in self._held_rates())
            or _mostly(step in graphs for step in self.tested_steps[1:])
            or self.unreached_bytes_per_step() > 0
        )

    @property
    def tested_steps(self) -> list[int]:
        """Return the steps of the tested samples, and before them the step from which the first one counts."""
        return [look.step for look in self._looks][: self._num_tested + 1]

    def suspects(self) -> dict[int, int]:
        self._forget_dead()
        tested = set(self.tested_steps[1:])
        return {address: birth.step for address, birth in self._births.items() if birth.step in tested}

    def suspect_bytes(self) -> int:
        return sum(self._births[address].num_bytes for address in self.suspects())

    def held_bytes_per_step(self) -> float:
        return median(self._held_rates())

    def unreached_bytes_per_step(self) -> float:
        """Return the growth of the allocator's bytes outside of live storages where it persists, else 0."""
        rates = [
            (after.unreached_bytes - before.unreached_bytes) / (after.step - before.step)
            for before, after in pairwise(self._looks)
        ]
        return median(rates) if _mostly(rate >= self._min_bytes_per_step for rate in rates) else 0.0

    def unreached_growth_bytes(self) -> int:
        return self._looks[-1].unreached_bytes - self._looks[0].unreached_bytes

    def offload(self) -> HostHoldings:
        first, last = self._looks[0].offload, self._looks[-1].offload
        return HostHoldings(last.num_bytes, last.num_allocations - first.num_allocations)

    def _held_rates(self) -> list[float]:
        self._forget_dead()
        alive: Counter[int] = Counter()
        for birth in self._births.values():
            alive[birth.step] += birth.num_bytes
        return [alive[step] / (step - before) for before, step in pairwise(self.tested_steps)]

    def _forget_dead(self) -> None:
        # The address of a dead storage cannot be reused before its weak reference is gone.
        self._births = {
            address: birth
            for address, birth in self._births.items()
            if not birth.storage.expired()  # type: ignore[no-untyped-call]
        }


def _mostly(verdicts: Iterable[bool]) -> bool:
    verdicts = list(verdicts)
    return sum(verdicts) >= _LEAKY_SHARE * len(verdicts)


def allocator_counter() -> Callable[[list[Tensor]], int] | None:
    """Count the bytes of the current accelerator's allocator that are in no tensor; None without such counters."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return _unreached_bytes if accelerator and accelerator.type in _COUNTING_DEVICES else None


def _unreached_bytes(tensors: list[Tensor]) -> int:
    index = torch.accelerator.current_device_index()
    reached = sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor.device.index == index)
    return torch.accelerator.memory_allocated() - reached
