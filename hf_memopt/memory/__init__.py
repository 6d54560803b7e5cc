"""Counts the uses of memory. Read in this order:

- `device_counters`, `saved_bytes`: where figures come from.
- `tracker`: peaks by phase of a training step. `logger`, `metrics_file`: those figures in words, logs and files.
- `attribution`, `oom`: the uses of live tensors, and the report when memory runs out.
- `leaks/`: tensors that stay behind at every step, and their holders.
- `ranks`: the processes that train together.
"""

from hf_memopt.memory.device_counters import Counters, DeviceMemory, HostMemory
from hf_memopt.memory.leaks.detect import Culprit, LeakMonitor, LeakReport, MemoryLeakError, detect_leaks
from hf_memopt.memory.logger import MemoryLogger
from hf_memopt.memory.oom import explain_oom
from hf_memopt.memory.saved_bytes import SavedBytes
from hf_memopt.memory.tracker import MemoryReading, MemoryTracker, PhasePeak

__all__ = [
    "Counters",
    "Culprit",
    "DeviceMemory",
    "HostMemory",
    "LeakMonitor",
    "LeakReport",
    "MemoryLeakError",
    "MemoryLogger",
    "MemoryReading",
    "MemoryTracker",
    "PhasePeak",
    "SavedBytes",
    "detect_leaks",
    "explain_oom",
]
