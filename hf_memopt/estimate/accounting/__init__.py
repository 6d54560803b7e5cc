"""What a simulated step allocates, and what for. Read in this order:

- `allocation_log`: when each storage was born and died.
- `memory_trace`: the changes of memory over time, and what is read off them.
- `step_phases`: which part of the step and which module is running.
- `labels`, `categories`: what each storage is for.
- `caching_allocator`: what CUDA's allocator reserves for a log.
- `pytree`: the tensors that go into and come out of an operation.
"""
