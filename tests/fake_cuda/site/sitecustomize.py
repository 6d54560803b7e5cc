"""Installs the fake operators at a forked process's first use of CUDA; Python imports this file from PYTHONPATH."""

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
