"""Counts the uses of memory: peaks by phase, owners when it runs out, leaks."""

from hf_memopt.memory.attribution import SavedBytes
from hf_memopt.memory.device_counters import Counters, DeviceMemory, HostMemory
from hf_memopt.memory.leaks.detect import LeakMonitor, detect_leaks
from hf_memopt.memory.leaks.leak_report import Culprit, LeakReport, MemoryLeakError
from hf_memopt.memory.logger import MemoryLogger, append_metrics, memory_metrics, phase_table
from hf_memopt.memory.oom import explain_oom
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
    "append_metrics",
    "detect_leaks",
    "explain_oom",
    "memory_metrics",
    "phase_table",
]
