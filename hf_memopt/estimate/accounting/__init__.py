"""The allocations of a simulated step, and their use. Read in this order:

- `allocation_history`: every storage, and every change of memory.
- `allocation_log`: follows a step, and writes its history.
- `categories`: the use of each storage.
- `kernel_memory`: memory that kernels take beside their results.
- `repeated_layers`: the history of a model with more layers, from that of one with few.
- `caching_allocator`: memory that CUDA's allocator reserves for a log.
"""
