"""The one seam between the memories of a run: device, host and disk."""

from hf_memopt.transfer.backends import clock_for, copier_for
from hf_memopt.transfer.copier import Copier, DeviceCopy, StreamCopier, SyncCopier, Transfer
from hf_memopt.transfer.scratch_file import DiskError
from hf_memopt.transfer.tier import Tier

__all__ = [
    "Copier",
    "DeviceCopy",
    "DiskError",
    "StreamCopier",
    "SyncCopier",
    "Tier",
    "Transfer",
    "clock_for",
    "copier_for",
]
