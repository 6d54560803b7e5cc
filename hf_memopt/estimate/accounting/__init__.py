"""What a simulated step allocates, and what for. Read in this order:

- `allocation_log`: when each storage was born and died, in which phase and in which module.
- `categories`: what each storage is for.
- `kernel_memory`: what kernels take beside their results.
- `caching_allocator`: what CUDA's allocator reserves for a log.
"""
