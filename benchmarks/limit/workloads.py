"""Trainings on a CPU whose memory is mostly saved activations: a language model, a neural operator, style transfer."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt.recipes.lgt.data import LatentBank, load
from hf_memopt.recipes.lgt.options import DataOptions
from hf_memopt.recipes.lgt.options import ModelOptions as LatentModelOptions
from hf_memopt.recipes.lgt.options import Options as LatentOptions
from hf_memopt.recipes.lgt.options import TrainingOptions as LatentTrainingOptions
from hf_memopt.recipes.lgt.step import Objective, build_model
from hf_memopt.recipes.neural_operator.darcy import HIGH, Darcy, samples
from hf_memopt.recipes.neural_operator.model import make_model
from hf_memopt.recipes.neural_operator.options import ModelOptions, TrainingOptions
from hf_memopt.recipes.neural_operator.step import LOSSES, make_optimizer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    """A training, ready to run.

    Attributes:
        loss: forward pass and loss of the next batch.
        loss_of_little: the same of a batch that is small, which makes everything else that a step leaves in memory.
        blocks: the modules to which activation checkpointing applies.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]
    loss_of_little: Callable[[], Tensor]
    blocks: list[nn.Module]


def language_model(is_toy: bool) -> Workload:
    """Make a Llama that learns to count: 19 million parameters, 2 sequences of 1,024 tokens."""
    width, num_layers, length, vocabulary = (128, 8, 1024, 256) if is_toy else (384, 10, 1024, 4096)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(length: int) -> Tensor:
        tokens = (torch.randint(vocabulary, (2, 1)) + torch.arange(length)) % vocabulary
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return Workload(model, optimizer, lambda: loss(length), lambda: loss(16), list(model.model.layers))


def neural_operator(is_toy: bool) -> Workload:
    """Make the recipe's FNO on Darcy flow: 5 million numbers, 8 layers, 1 sample of 384 x 384."""
    nodes = 128 if is_toy else 384
    model = make_model(ModelOptions(modes=8 if is_toy else 24, num_layers=8)).train()
    optimizer = make_optimizer(model, TrainingOptions())
    coefficients, solutions = zip(*samples(Darcy("train", nodes, 4), CPU, batch_size=1), strict=True)
    inputs = [(each == HIGH).float()[:, None] for each in coefficients]
    scale = torch.cat(solutions).std()
    targets = [(each / scale).float()[:, None] for each in solutions]

    def loss(stride: int) -> Tensor:
        number = int(torch.randint(len(inputs), ()))
        x, y = (each[number][..., ::stride, ::stride] for each in (inputs, targets))
        found: Tensor = LOSSES["h1"](model(x), y)
        return found

    blocks = [model.lifting, model.fno_blocks, model.projection]
    return Workload(model, optimizer, lambda: loss(1), lambda: loss(nodes // 32), blocks)


def style_transfer(is_toy: bool) -> Workload:
    """Make the LGT recipe: 2.6 million parameters, 12 latents of 4 x 32 x 32, 10 Euler steps with gradients."""
    options = LatentOptions(
        model=LatentModelOptions(base_channels=32),
        data=DataOptions(num_generated=16 if is_toy else 64),
        training=LatentTrainingOptions(batch_size=1 if is_toy else 12),
    )
    model = build_model(options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.training.learning_rate)
    latents, _held_out = load(options)
    bank, objective, numbers = LatentBank(latents, options, CPU), Objective(options), itertools.count()

    def loss(num_latents: int) -> Tensor:
        rows = torch.randint(len(latents.styles), (num_latents,))
        (batch,) = bank.micro_batches([rows], next(numbers), options.training.epsilon)
        found = objective(model, batch)
        objective.take_means()
        return found

    return Workload(model, optimizer, lambda: loss(options.training.batch_size), lambda: loss(1), [model.unet])


WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "language model": language_model,
    "neural operator": neural_operator,
    "style transfer": style_transfer,
}
