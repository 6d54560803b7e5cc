"""The LGT recipe: latents move to another style along ten Euler steps."""

import itertools

import torch
from torch import Tensor

from benchmarks.limit.workloads import Workload
from hf_memopt.recipes.lgt.data import LatentBank, load
from hf_memopt.recipes.lgt.options import DataOptions, ModelOptions, Options, TrainingOptions
from hf_memopt.recipes.lgt.step import Objective, build_model


def make(is_toy: bool) -> Workload:
    """Make a network of 2.6 million parameters, 8 latents of 4 x 32 x 32, 10 Euler steps with gradients."""
    options = Options(
        model=ModelOptions(base_channels=32),
        data=DataOptions(num_generated=16 if is_toy else 64),
        training=TrainingOptions(batch_size=1 if is_toy else 8),
    )
    model = build_model(options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.training.learning_rate)
    latents, _held_out = load(options)
    bank, objective, numbers = LatentBank(latents, options, torch.device("cpu")), Objective(options), itertools.count()

    def loss(num_latents: int) -> Tensor:
        rows = torch.randint(len(latents.styles), (num_latents,))
        (batch,) = bank.micro_batches([rows], next(numbers), options.training.epsilon)
        found = objective(model, batch)
        objective.take_means()
        return found

    return Workload(model, optimizer, lambda: loss(options.training.batch_size), lambda: loss(1), [model.unet])
