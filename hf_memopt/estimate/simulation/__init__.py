"""The accelerator without hardware. Read in this order:

- `device`: fake tensors on a device that follows CUDA's rules.
- `autocast`, `attention`: which dtype and which attention kernel CUDA would choose.
- `fused_head`: TRL's output layer, whose kernels on CUDA work in place.
- `data_dependent`: answers to questions that only real numbers could answer.
- `first_rank`: one process of several, without the others.
- `quantised`: frozen weights in 4 and 8 bits, and optimizers with states in 8.
- `virtual_time`: how long compute and copies would take.
- `child_process`: runs a simulation where it leaves nothing behind.
"""
