"""The one seam between device and host memory."""

from hf_memopt.transfer.copier import Copier, StreamCopier, SyncCopier, Transfer, copier_for

__all__ = ["Copier", "StreamCopier", "SyncCopier", "Transfer", "copier_for"]
