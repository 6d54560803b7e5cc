"""Which kernels CUDA would run, where other devices take other ones."""
