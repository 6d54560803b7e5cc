"""The accelerator without hardware. Read in this order:

- `device`: fake tensors on a device that follows CUDA's rules. `fake_mode`: the mode that makes tensors fake.
- `kernels`: which dtype and which kernels CUDA would choose.
- `known_values`: whole numbers that are known after all. `data_dependent`: answers to questions that only real numbers
  could answer.
- `ranks`: one process of several, without the others.
- `quantised`: frozen weights in 4 and 8 bits, and optimizers with states in 8.
- `kernel_work`, `virtual_time`: work of operations, and how long compute and copies would take.
- `child_process`: runs a simulation where it leaves nothing behind.
"""
