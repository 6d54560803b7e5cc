"""The storages that have memory at the moment: those in use, those fetched ahead, and those that stay."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hf_memopt.autograd_state import is_plain
from hf_memopt.transfer import Copier
from hf_memopt.weights.residency.storages import CastWeight, StreamedStorage
from hf_memopt.weights.residency.visit_order import Visit, VisitOrder

# Between them may be visits of storages that stay.
_MAX_VISITS_AHEAD = 32


class ResidentSet:
    """Brings storages for visits, keeps those in use, fetches the next ones, and drops the others.

    Uses are counted: the visits of a recomputed region and of the backward that asks for it overlap.

    Attributes:
        device_bytes: of all storages that have memory.
        peak_device_bytes: their peak.
        reasons: by number, the reason for which a storage stays.
        bytes_brought: to storages, so far.
        visit_bytes: that the largest visit of a known pass needs, with as much fetched ahead; None before.
    """

    def __init__(self, storages: Sequence[StreamedStorage], copier: Copier) -> None:
        self.storages = storages
        self.reasons: dict[int, str] = {}
        self.device_bytes = self.peak_device_bytes = self.bytes_brought = 0
        self.visit_bytes: int | None = None
        self._copier = copier
        self._order = VisitOrder()
        self._casts: dict[tuple[int, torch.dtype], CastWeight] = {}
        # The next visits' storages, which are fetched ahead and not dropped before.
        self._window: set[int] = set()
        self._ahead_bytes = 0
        self._unused: set[int] = set()

    def begin(self, kind: str, has_failed: bool) -> list[Visit]:
        """Begin a pass of a kind; returns the visits that are expected, none where no such pass has been finished.

        Args:
            kind: such as "training".
            has_failed: whether the pass before has.
        """
        expected = self._order.begin(kind, has_failed)
        self._ahead_bytes = max(map(self._bytes_of, expected), default=0)
        if expected:
            self.visit_bytes = 2 * self._ahead_bytes
        self.drop_ahead()
        return expected

    def drop_ahead(self) -> None:
        """Drop the storages that were fetched for visits that have not come."""
        self._window = set()
        self._drop_unused()

    def keep(self, number: int, reason: str) -> None:
        """Have a storage keep its memory from its next visit on."""
        self.storages[number].stays = True
        self.reasons[number] = reason
        self._unused.discard(number)

    def keep_handed_out(self, visit: Visit, outputs: Iterable[Tensor]) -> None:
        """Keep those storages of a visit of which a module has returned a view: any code may read it."""
        keys = {self.storages[number].key: number for number in visit}
        for tensor in outputs:
            memory = _without_transforms(tensor)
            if is_plain(memory) and memory.untyped_storage()._cdata in keys:
                self.keep(keys[memory.untyped_storage()._cdata], "returned by its module")

    def keep_most_visited(self, visits: Sequence[Visit], budget_bytes: int) -> None:
        """Have those storages stay for which there is room beside the others' visits.

        The most often visited ones stay; of equal ones, some all over the order, so that the copies of the others take
        place while those compute.
        """
        counts = Counter(number for visit in visits for number in visit)
        room = budget_bytes - 2 * max(map(self._bytes_of, visits)) - self._bytes_of(self.reasons)
        for number in sorted(counts, key=lambda each: (-counts[each], _reversed_bits(each))):
            num_bytes = self.storages[number].num_bytes
            if num_bytes <= room and number not in self.reasons:
                self.keep(number, "within the budget")
                room -= num_bytes

    def enter(self, visit: Visit, cast: CastWeight | None = None) -> None:
        """Have the storages of a visit on the device, or a cast of its weight, and fetch those of the next visits."""
        self._order.note(visit)
        self._look_ahead()
        with torch._C._DisableFuncTorch():  # which forbids writes to memory that it does not track
            self._drop_unused(visit)
            if cast is None:
                self._take(visit)
            else:
                self._take_cast(visit, cast)
            try:
                for number in self._window:
                    self._fetch(number)
            except BaseException:
                self.leave(visit, cast)
                raise

    def leave(self, visit: Visit, cast: CastWeight | None = None) -> None:
        if cast is None:
            self._give_up(visit)
        else:
            cast.users -= 1
            if not cast.users:
                cast.drop()
                self._count(-cast.num_bytes)
        self._drop_unused()

    def cast(self, number: int, weight: Tensor, dtype: torch.dtype) -> CastWeight:
        """Return the cast of a weight of a storage."""
        found = self._casts.get((id(weight), dtype))
        if found is None:
            storage = self.storages[number]
            place = next(place for place, tensor in enumerate(storage.tensors) if tensor is weight)
            found = self._casts[id(weight), dtype] = CastWeight(storage.present[place], dtype, self._copier)
        return found

    def is_used(self, number: int) -> bool:
        tensors = {id(tensor) for tensor in self.storages[number].tensors}
        return bool(self.storages[number].users) or any(
            cast.users and weight in tensors for (weight, _), cast in self._casts.items()
        )

    def resident_bytes(self) -> dict[str, int]:
        """Return by reason the bytes of storages that stay."""
        found: dict[str, int] = {}
        for number, reason in self.reasons.items():
            found[reason] = found.get(reason, 0) + self.storages[number].num_bytes
        return found

    def restore(self) -> None:
        """Have all storages stay, and bind their parameters to them."""
        for number in range(len(self.storages)):
            self.keep(number, "no longer streamed")
            self._take((number,))

    def _bytes_of(self, numbers: Iterable[int]) -> int:
        return sum(self.storages[number].num_bytes for number in numbers)

    def _look_ahead(self) -> None:
        """Put into the window the next visits that need bytes, as many as the largest visit has."""
        room = self._ahead_bytes
        self._window = set()
        for visit in self._order.coming(_MAX_VISITS_AHEAD):
            missing = {number for number in visit if not self.storages[number].stays} - self._window
            room -= self._bytes_of(missing)
            if room < 0:
                break
            self._window |= missing

    def _take(self, visit: Visit) -> None:
        for number in visit:
            self._fetch(number)
        for number in visit:
            self.storages[number].arrive()
        for number in visit:
            self.storages[number].users += 1
            self._unused.discard(number)

    def _give_up(self, visit: Visit) -> None:
        for number in visit:
            storage = self.storages[number]
            storage.users -= 1
            if not storage.users and not storage.stays:
                self._unused.add(number)

    def _take_cast(self, visit: Visit, cast: CastWeight) -> None:
        """Make a cast, unless it is there; its weight visits for as long as that takes."""
        if not cast.users:
            self._take(visit)
            try:
                cast.make()
                self._count(cast.num_bytes)
            finally:
                self._give_up(visit)
        cast.users += 1

    def _fetch(self, number: int) -> None:
        storage = self.storages[number]
        if not storage.has_memory:
            self._count(storage.num_bytes)
            self.bytes_brought += storage.num_bytes
            if not storage.stays:
                self._unused.add(number)
        storage.fetch()

    def _drop_unused(self, visit: Visit = ()) -> None:
        """Drop the storages without users, except those of a visit that begins and those of the next ones."""
        for number in self._unused - self._window - set(visit):
            self._unused.discard(number)
            self._count(-self.storages[number].num_bytes)
            self.storages[number].drop()

    def _count(self, num_bytes: int) -> None:
        self.device_bytes += num_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)


def _without_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor inside of those that `torch.func` wraps it in."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _reversed_bits(number: int) -> int:
    return int(f"{number:032b}"[::-1], 2)
