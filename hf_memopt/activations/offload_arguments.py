"""The options of `ActivationOffloader` as fields, for command lines and configuration files."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

import torch

from hf_memopt.activations.offloader import ActivationOffloader
from hf_memopt.activations.skipped_modules import SkippedModules
from hf_memopt.command_line import flag
from hf_memopt.ranges import COUNT_OR_ZERO, NOT_NEGATIVE
from hf_memopt.transfer import SyncCopier
from hf_memopt.transfer.scratch_file import check_disk

# The other fields are passed to the offloader unchanged.
_OWN = {"offload", "budget_gib", "cpu_copies"}


@dataclass
class OffloadArguments:
    """Options of activation offloading.

    Raises:
        ValueError: `skip` is no list of names, `disk` no folder, or its budget is set without it.
    """

    offload: Literal["off", "auto", "all", "inputs"] = flag("auto", "which saved activations leave the device")
    budget_gib: Annotated[float, NOT_NEGATIVE] | None = flag(
        None, "auto: device memory that saved activations may hold, in GiB"
    )
    max_slowdown: Annotated[float, NOT_NEGATIVE] = flag(
        0.03, "auto without a budget: share of the step's time that offloading may cost"
    )
    offload_threshold_mb: Annotated[float, NOT_NEGATIVE] = flag(
        10.0, "storages smaller than this many MiB stay on the device"
    )
    prefetch_ahead: Annotated[int, COUNT_OR_ZERO] = flag(2, "how many storages backward brings back ahead of their use")
    pin_memory: bool = flag(True, "use page-locked host memory")
    host_budget_gib: Annotated[float, NOT_NEGATIVE] | None = flag(None, "host memory to use at most, in GiB")
    disk: str | None = flag(
        None, "folder on a local disk, for storages that host memory has no room for; on a CPU for all that leave"
    )
    disk_budget_gib: Annotated[float, NOT_NEGATIVE] | None = flag(None, "room on that disk to use at most, in GiB")
    skip: list[str] = flag(
        [], "names or classes of modules whose saved tensors stay on the device, with wildcards, such as vision_tower"
    )
    cpu_copies: bool = flag(False, "on a CPU: perform the copies, to try it out. It saves no memory there")

    def __post_init__(self) -> None:
        SkippedModules(self.skip)
        check_disk(self.disk, self.disk_budget_gib)

    def moves_on(self, device_type: str) -> bool:
        """Return whether offloading moves bytes at all: a CPU's are in host memory already."""
        return self.offload != "off" and (device_type != "cpu" or self.cpu_copies or self.disk is not None)

    def make_offloader(self, device: torch.device) -> ActivationOffloader | None:
        if self.offload == "off":
            return None
        return ActivationOffloader(
            mode=self.offload,
            budget_gib=self.budget_gib if self.offload == "auto" else None,
            copier=SyncCopier() if self.cpu_copies and device.type == "cpu" else None,
            **{each.name: getattr(self, each.name) for each in fields(OffloadArguments) if each.name not in _OWN},
        )
