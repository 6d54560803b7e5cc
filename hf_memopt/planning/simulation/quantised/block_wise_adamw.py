"""AdamW of bitsandbytes: states of 8 bits, and pages in memory that host and device share. Bytes, no numbers.

Source: `Optimizer8bit`, `Optimizer2State` and `get_paged` of bitsandbytes 0.50.1.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

# Numbers that share a scale; from so many on states take 8 bits, and pages.
_BLOCK = 256
_FEWEST_IN_8_BITS = 4096
_FEWEST_IN_PAGES = 100_000


class BlockWiseAdamW(Optimizer):
    """AdamW with two states per number: a byte, and a float32 for each 256; with 32 `bits`, or if small, a float32.

    Paged states of large weights lie in memory that CUDA moves between host and device, not torch; here, on the host.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bits: int, is_paged: bool, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})
        self._bits = bits
        self._is_paged = is_paged
        self._maps: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "a simulated step has no closure"
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is None:
                continue
            if not self.state[parameter]:
                self.state[parameter] = self._initial_state(parameter)
            # One kernel does all of this.
            parameter.add_(parameter.grad)
            for name in ("state1", "state2"):
                self.state[parameter][name].zero_()

    def _initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        in_8_bits = self._bits == 8 and parameter.numel() >= _FEWEST_IN_8_BITS
        dtype = torch.uint8 if in_8_bits else torch.float32
        place = "cpu" if self._is_paged and parameter.numel() >= _FEWEST_IN_PAGES else parameter.device
        state = {name: torch.zeros_like(parameter, dtype=dtype, device=place) for name in ("state1", "state2")}
        if not in_8_bits:
            return state
        for name in ("qmap1", "qmap2"):
            if name not in self._maps:
                self._maps[name] = torch.empty(256, device=parameter.device)
            state[name] = self._maps[name]
        num_blocks = -(-parameter.numel() // _BLOCK)
        return state | {name: torch.zeros(num_blocks, device=parameter.device) for name in ("absmax1", "absmax2")}
