"""Which kernels CUDA would run, where other devices take other ones. Read in this order:

- `autocast`: operations that autocast runs in another dtype on CUDA.
- `attention`: the kernel that torch would choose, and the tensors that it keeps.
"""
