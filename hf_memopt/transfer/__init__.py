"""The one seam between device and host memory."""

from hf_memopt.transfer.backends import clock_for, copier_for
from hf_memopt.transfer.copier import Copier, StreamCopier, SyncCopier, Transfer

__all__ = ["Copier", "StreamCopier", "SyncCopier", "Transfer", "clock_for", "copier_for"]
