"""A CUDA runtime without a GPU: the installed torch runs its real CUDA stack on it, in a process of its own.

The caching allocator, streams, events, autograd threads, choice of attention kernels and sync debug mode are torch's.
`runtime/` replaces `libcudart.so.13`: streams are threads with queues, copies are asynchronous, device memory and
registrations are booked, and each operator runs the CPU's kernel in its stream's order. A breach of CUDA's rules about
order and memory is an error at the call, and is listed at the end of the test.

`launch.py` starts a process on the runtime, `plugin.py` makes pytest use it there, and `device.py` has its settings and
state. The runtime shows nothing about GPU kernels' numerics, a driver's response to misuse, or time.
"""
