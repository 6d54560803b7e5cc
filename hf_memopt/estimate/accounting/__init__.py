"""What a simulated step allocates, and what for. Read in this order:

- `allocation_history`: every storage, and every change of memory.
- `allocation_log`: follows a step, and writes its history.
- `categories`: what each storage is for.
- `communication`: what a rank holds for the sake of the others.
- `kernel_memory`: what kernels take beside their results.
- `repeated_layers`: the history of a model with more layers, from that of one with few.
- `caching_allocator`: what CUDA's allocator reserves for a log.
"""
