"""A start-up module, which Python imports if its folder is on PYTHONPATH: forked processes get the fake operators.

The operators are installed when a forked process first uses CUDA, so that processes forked earlier can use CUDA too.
"""

import os


def install_with_cuda() -> None:
    import torch
    from fake_cuda import device

    start_cuda = torch.cuda._lazy_init

    def start_and_install() -> None:
        if not torch.cuda.is_initialized():
            torch.cuda._lazy_init = start_cuda
            device.install_operators()
        start_cuda()

    torch.cuda._lazy_init = start_and_install


os.register_at_fork(after_in_child=install_with_cuda)
