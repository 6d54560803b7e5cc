"""The recipe's Fourier neural operator on Darcy flow."""

import torch
from torch import Tensor

from benchmarks.limit.workloads import Workload
from hf_memopt.recipes.neural_operator.darcy import HIGH, Darcy, samples
from hf_memopt.recipes.neural_operator.options import ModelOptions, TrainingOptions
from hf_memopt.recipes.neural_operator.step import make_model, make_optimizer, relative_errors


def make(is_toy: bool) -> Workload:
    """Make one of 16 layers, for 1 sample of 320 x 320."""
    nodes = 128 if is_toy else 320
    model = make_model(ModelOptions(modes=8 if is_toy else 24, num_layers=16)).train()
    optimizer = make_optimizer(model, TrainingOptions())
    coefficients, solutions = zip(*samples(Darcy("train", nodes, 4), torch.device("cpu"), batch_size=1), strict=True)
    inputs = [(each == HIGH).float()[:, None] for each in coefficients]
    scale = torch.cat(solutions).std()
    targets = [(each / scale).float()[:, None] for each in solutions]

    def loss(stride: int) -> Tensor:
        number = int(torch.randint(len(inputs), ()))
        x, y = (each[number][..., ::stride, ::stride] for each in (inputs, targets))
        found: Tensor = relative_errors(2)["h1"](model(x), y)
        return found

    blocks = [model.lifting, model.fno_blocks, model.projection]
    return Workload(model, optimizer, lambda: loss(1), lambda: loss(nodes // 32), blocks)
