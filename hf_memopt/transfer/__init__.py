"""The one seam between device and host memory. Read in this order:

- `copier`: copies between the two, on a CPU and on an accelerator with streams.
- `clock`: time as the compute stream sees it.
- `host_memory`: page-locked memory of exactly the size that is asked for.
- `host_arena`: cuts blocks for offloaded tensors out of a few large regions.
- `device_types`: which of these a type of device has; a simulated device registers its own.
- `link`: how fast the link between device and host is, measured.
"""

from hf_memopt.transfer.backends import clock_for, copier_for
from hf_memopt.transfer.copier import Copier, StreamCopier, SyncCopier, Transfer

__all__ = ["Copier", "StreamCopier", "SyncCopier", "Transfer", "clock_for", "copier_for"]
