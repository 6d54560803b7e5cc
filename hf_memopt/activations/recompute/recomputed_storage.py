"""A saved storage that backward computes again."""

import sys

import torch
from torch import Tensor

from hf_memopt.activations.recompute.replay import Recomputation
from hf_memopt.activations.saved_tensors.device_state import DeviceState
from hf_memopt.activations.saved_tensors.storages import LiveStorage
from hf_memopt.uncompiled import uncompiled


class RecomputedStorage(LiveStorage):
    """Computed again when needed, from live sources that it keeps until then, and held until its last need."""

    def __init__(
        self, tensor: Tensor, device: DeviceState, index: int, computation: Recomputation, owner: str | None
    ) -> None:
        self._sources: list[LiveStorage] = []
        super().__init__(tensor, device, index, owner=owner)
        self._computation: Recomputation | None = computation
        self._device_type = tensor.device.type
        self._memory: Tensor | None = None
        self._computed_in = 0
        sources = [source.live for source in computation.sources() if source.live is not None]
        self._sources = list(dict.fromkeys(sources))
        for source in self._sources:
            source.num_dependents += 1

    def ripen(self) -> None:
        """Do nothing: this kind is never pending."""

    def _bring(self, backward: int) -> Tensor:
        if self._memory is None:
            with self._range("recompute"):
                self._memory = self._compute(backward)
            assert self._memory.nbytes == self.num_bytes
            if not self.is_read_again():  # then the result stays for as long as it may be asked for
                self._drop_sources()
        return self._memory

    def _compute(self, backward: int) -> Tensor:
        # Its sources count how often they are asked: once by this storage in each backward.
        is_first = self._computed_in != backward
        self._computed_in = backward
        memory = {source: source.fetch(backward, is_first) for source in self._sources}
        self._count()
        assert self._computation is not None
        # Operations were noted below autograd and autocast, with their casts made.
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False):
            return self._computation.run(memory)

    def _give_up(self) -> None:
        if self._computation is None:  # it could not be made a second time
            return
        self._memory = None
        self._uncount_after_node()

    def _drop_sources(self) -> None:
        for source in self._sources:
            source.num_dependents -= 1
        self._sources = []
        self._computation = None

    @uncompiled
    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._drop_sources()
            self._forget()
