"""Streaming: frozen weights come to the device as they are read, and are dropped when that is over."""

import math

from torch import nn

from hf_memopt.transfer import Copier
from hf_memopt.weights.homes.home import WeightsHome
from hf_memopt.weights.homes.packed_weights import PackedWeights
from hf_memopt.weights.residency.resident_set import forecast
from hf_memopt.weights.residency.visit_order import Visit
from hf_memopt.weights.residency.visiting import Visiting
from hf_memopt.weights.strategies.placement import REMEDY_OF_WRITES, WeightPlacement


class StreamedVisits(WeightPlacement):
    """Streams a module's weights through a little device memory while the module runs.

    Each weight comes as it is read, and the next ones are on their way, in the order of the visit before. Weights that
    a visit reads again and again stay meanwhile, as far as the budget allows; unread ones never travel. Rows of
    embeddings are looked up at home. Between visits nothing is on the device.

    Args:
        budget_bytes: device memory. What a module reads is allowed anyway, with what the next one reads. None: what is
            read again stays until it is read no more.
    """

    mode = "stream"

    def __init__(
        self,
        module: nn.Module,
        weights: PackedWeights,
        home: WeightsHome,
        copier: Copier,
        budget_bytes: int | None,
        reason: str,
    ) -> None:
        self.reason = reason
        self.host_bytes = home.host_bytes
        self._home = home
        self._sizes = [piece.num_bytes for piece in weights.slices]
        self._budget_bytes = math.inf if budget_bytes is None else budget_bytes
        self._visits: list[Visit] = []
        self._visiting = Visiting(
            module,
            weights,
            home,
            copier.empty_device(0).device,
            copier,
            self._budget_bytes,
            repeats=False,
            remedy="call the teacher, and read its weights, inside `with teacher.onload():`",
            remedy_of_writes=REMEDY_OF_WRITES,
        )
        self._visiting.finish(home.views, has_failed=False)

    def device_memory(self) -> tuple[int, int]:
        return self._visiting.storages.device_bytes, self._visiting.storages.peak_device_bytes

    @property
    def is_known(self) -> bool:
        """Return whether a visit has been finished in which weights were read."""
        return bool(self._visits)

    def predictions(self) -> dict[str, float | None]:
        return {"predicted_device_bytes": self.forecast(self._budget_bytes)[0]} if self.is_known else {}

    def forecast(self, budget_bytes: float) -> tuple[int, int]:
        """Return the peak of the device memory within a budget, and the bytes that a visit like the last one copies."""
        return forecast(self._visits, self._sizes, max(budget_bytes, self._visiting.storages.visit_bytes or 0))

    def set_budget(self, budget_bytes: float) -> None:
        self._budget_bytes = budget_bytes
        self._visiting.storages.set_budget(budget_bytes)

    def prefetch(self) -> None:
        with self._visiting.lock:
            self._visiting.storages.look_ahead()

    def onload(self) -> None:
        self._home.check()
        self._visiting.bind()
        self._visiting.is_active = True
        self.prefetch()

    def evict(self, finished: bool) -> None:
        """End a visit. A finished one, without an exception, is expected again."""
        visits = self._visiting.finish(self._home.views, not finished)
        if finished and visits:
            self._visits = list(visits)
        if finished:
            self._home.check()

    def close(self) -> None:
        """Give up device memory and hooks, between visits."""
        self._visiting.finish(self._home.views, has_failed=True)
        self._visiting.remove()
