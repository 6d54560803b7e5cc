"""Training steps that leak memory, and steps that only look as if they did."""

from collections.abc import Callable
from copy import deepcopy
from typing import ClassVar

import torch
from torch import Tensor, nn

WIDTH, BATCH = 32, 16


ACTIVATION_BYTES = 4 * BATCH * WIDTH


Step = Callable[[], object]


def toy() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return model, torch.optim.Adam(model.parameters())


def inputs(batch: int = BATCH) -> Tensor:
    return torch.randn(batch, WIDTH)


def toy_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = BATCH) -> Tensor:
    loss: Tensor = model(inputs(batch)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def kept_loss() -> Step:
    model, optimizer = toy()
    losses = []
    return lambda: losses.append(toy_step(model, optimizer))


def retained_graph() -> Step:
    model, _ = toy()
    losses = []

    def step() -> None:
        loss = model(inputs()).square().mean()
        loss.backward(retain_graph=True)
        losses.append(loss)

    return step


def growing_outputs() -> Step:
    model, optimizer = toy()
    outputs = []

    def step() -> None:
        toy_step(model, optimizer)
        outputs.append(model[0](inputs()).detach())

    return step


def growing_outputs_of_any_length() -> Step:
    model, _ = toy()
    outputs = {}

    def step() -> None:
        outputs[len(outputs)] = model[0](inputs(int(torch.randint(8, 64, ())))).detach()

    return step


def parameter_gradient_cycle() -> Step:
    model, _ = toy()
    return lambda: model(inputs()).square().mean().backward(create_graph=True)


def failing_forward(model: nn.Sequential) -> None:
    hidden = model[0](inputs())
    raise ValueError(f"bad batch of {len(hidden)}")


def swallowed_exception() -> Step:
    model, _ = toy()
    errors = []

    def step() -> None:
        try:
            failing_forward(model)
        except ValueError as error:
            errors.append(error)

    return step


def garbage_cycle() -> Step:
    class Node:
        def __init__(self) -> None:
            self.me, self.batch = self, inputs()

    return Node


def class_attribute() -> Step:
    class Network:
        cache: ClassVar[dict[int, Tensor]] = {}

        def forward(self) -> None:
            self.cache[len(self.cache)] = inputs()

    return Network().forward


LEAKS: dict[str, tuple[Callable[[], Step], str, tuple[int | None, ...], str]] = {
    "kept loss": (kept_loss, "tensor with its graph", (), "losses["),
    "retain_graph with kept losses": (retained_graph, "saved for backward", (BATCH, WIDTH), "losses["),
    "growing list": (growing_outputs, "tensor", (BATCH, WIDTH), "outputs["),
    "growing dict, lengths differ": (growing_outputs_of_any_length, "tensor", (None, WIDTH), "outputs["),
    "create_graph": (parameter_gradient_cycle, "saved for backward", (BATCH, WIDTH), "in the graph of the .grad of"),
    "exception": (
        swallowed_exception,
        "tensor with its graph",
        (BATCH, WIDTH),
        "].__traceback__ → hidden of fail",
    ),
    "cycle": (garbage_cycle, "tensor", (BATCH, WIDTH), "<Node>.batch"),
    "class attribute": (class_attribute, "tensor", (BATCH, WIDTH), "Network.cache["),
}


def plain() -> Step:
    model, optimizer = toy()
    return lambda: toy_step(model, optimizer)


def kept_values() -> Step:
    model, optimizer = toy()
    losses = []
    return lambda: losses.append(toy_step(model, optimizer).detach())


def lengths(order: Callable[[], int], held: int) -> Step:
    """Keep the last `held` batches alive between steps, as a data loader that works ahead."""
    model, optimizer = toy()
    alive: list[Tensor] = []

    def step() -> None:
        alive.append(inputs(order()))
        model(alive[0]).square().mean().backward()
        optimizer.step()
        del alive[: -held or None]

    return step


def random_lengths() -> Step:
    return lengths(lambda: int(torch.randint(1, 200, ())), held=1)


def sorted_lengths() -> Step:
    ascending = iter(range(8, 8000, 8))
    return lengths(lambda: next(ascending), held=8)


def sorted_then_bucketed_lengths() -> Step:
    buckets = iter([*range(8, 8 * 30, 8), *(8 * (1 + int(torch.randint(30, ()))) for _ in range(100))])
    return lengths(lambda: next(buckets), held=4)


def evaluation() -> Step:
    model, optimizer = toy()
    state = {"step": 0, "predictions": None}

    def step() -> None:
        toy_step(model, optimizer)
        state["step"] += 1
        if state["step"] % 7 == 0:
            with torch.no_grad():
                state["predictions"] = torch.cat([model[0](inputs()) for _ in range(state["step"])])

    return step


def r1_penalty() -> Step:
    """Take a gradient penalty with `retain_graph=True`, which was taken for a leak."""
    discriminator, optimizer = toy()

    def step() -> None:
        real = inputs().requires_grad_()
        outputs = discriminator(real)
        (gradient,) = torch.autograd.grad(
            outputs=outputs.sum(), inputs=real, create_graph=True, retain_graph=True, only_inputs=True
        )
        (outputs.mean() + gradient.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def create_graph_and_zero_grad() -> Step:
    model, optimizer = toy()

    def step() -> None:
        model(inputs()).square().mean().backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def cache_by_length() -> Step:
    """Fill the cache in no order, so that the last new length may come late."""
    model, optimizer = toy()
    cosines: dict[int, Tensor] = {}

    def step() -> None:
        length = int(torch.randint(1, 24, ()))
        toy_step(model, optimizer)
        cosines.setdefault(length, torch.randn(64 * length))

    return step


def moving_average() -> Step:
    model, optimizer = toy()
    average = deepcopy(model)
    replaced = [[torch.zeros_like(p) for p in model.parameters()]]

    def step() -> None:
        toy_step(model, optimizer)
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)
            replaced[0] = [old.lerp(new, 0.1) for old, new in zip(replaced[0], model.parameters(), strict=True)]

    return step


def kept_every_tenth_step() -> Step:
    """Keep results as a user does once per epoch, with very short epochs."""
    model, optimizer = toy()
    kept: list[Tensor] = []
    count = iter(range(10_000))

    def step() -> None:
        toy_step(model, optimizer)
        if next(count) % 10 == 0:
            kept.append(inputs())

    return step


SOUND = [
    plain,
    kept_values,
    random_lengths,
    sorted_lengths,
    sorted_then_bucketed_lengths,
    evaluation,
    r1_penalty,
    create_graph_and_zero_grad,
    cache_by_length,
    moving_average,
    kept_every_tenth_step,
]
