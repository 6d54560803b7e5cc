"""Functions on the virtual accelerator, and the operations that torch performs there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.planning.accounting.allocation_log import AllocationLog, StepPhases
from hf_memopt.planning.accounting.categories import StepLabels
from hf_memopt.planning.cards.gpus import DEFAULT_CARD, Card
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.planning.simulation.device import simulation
from hf_memopt.planning.simulation.virtual_base import VirtualBase
from hf_memopt.planning.simulation.virtual_disk import VirtualDisk
from hf_memopt.planning.simulation.virtual_time import VirtualClock


class Operations(TorchDispatchMode):
    """Names of torch's own operations inside, detaching left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "aten" and function is not torch.ops.aten.detach.default:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@contextmanager
def operations() -> Iterator[list[str]]:
    watch = Operations()
    with watch:
        yield watch.names


def unread_base(card: Card = DEFAULT_CARD) -> VirtualBase:
    labels = StepLabels(AllocationLog("cpu", 1, StepPhases()))
    return VirtualBase(VirtualDisk(VirtualClock(card), None), labels)


def simulated(function: Callable[[torch.device], Any], card: Card = DEFAULT_CARD) -> Any:
    """Return the result of `function` on the virtual device, in a process of its own."""

    def run() -> Any:
        with simulation("cuda", unread_base(card)) as (device, _):
            return function(device)

    return run_isolated(run)
