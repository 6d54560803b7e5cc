"""A CUDA runtime without a GPU: the installed torch runs its real CUDA stack on it, in a process of its own.

The caching allocator, streams, events, autograd threads, choice of attention kernels and sync debug mode are torch's
own. Below them, `runtime/` replaces `libcudart.so.13`. Streams are threads with queues, copies are asynchronous, device
memory and registrations are booked, and each operator runs the CPU's kernel in the order of its stream. A breach of
CUDA's rules about order and memory is an error at the call, and is listed at the end of the test.

`launch.py` starts a process on the runtime, `plugin.py` makes pytest use it there, and `device.py` changes its settings
and reads its state.

The runtime shows nothing about the numerics of GPU kernels, about a driver's response to misuse, or about time.
"""
