"""A loss scaler for complex weights, such as those of spectral convolutions."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler


class ComplexGradScaler(GradScaler):
    """Unscales complex gradients through real views, as torch has a kernel for those alone (pytorch/pytorch#58228)."""

    def _unscale_grads_(self, optimizer: Any, *settings: Any) -> dict[torch.device, torch.Tensor]:
        parameters = [_as_real(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        in_real_numbers: Any = SimpleNamespace(param_groups=[{"params": parameters}])
        return super()._unscale_grads_(in_real_numbers, *settings)


def _as_real(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None or not parameter.is_complex():
        return parameter
    view = torch.view_as_real(parameter.detach())
    view.grad = torch.view_as_real(parameter.grad)
    return view
