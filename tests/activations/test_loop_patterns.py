"""Tests that loops that interleave forwards and backwards give bitwise the plain gradients, metrics and weights."""

import copy
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from adversarial_copier import COPIERS
from random_plans import RandomPlanner
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.optim import AdamW

from hf_memopt import ActivationOffloader
from hf_memopt.activations import plan_maker

pytestmark = pytest.mark.usefixtures("quick_plans")

WIDTH, CLASSES, BATCH, NUM_STEPS = 16, 8, 12, 6
CHOSEN_COPIERS = ("sync", "late", "random")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Networks(nn.Module):
    """A classifier of inputs, and a critic of the classifier's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, CLASSES))
        self.critic = nn.Sequential(nn.Linear(CLASSES, 24), nn.LeakyReLU(0.2, inplace=True), nn.Linear(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x)


@dataclass
class Loop:
    """The batch of a step, and all values so far that have to equal the plain loop's."""

    networks: Networks
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)
    step: int = 0
    seen: list[Tensor] = field(default_factory=list)
    left_over: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._optimizers = [AdamW(part.parameters(), lr=1e-2) for part in self.networks.children()]

    def begin(self, step: int) -> None:
        torch.manual_seed(step)
        self.step, self.x, self.y = step, torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))

    def micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x.chunk(4), self.y.chunk(4), strict=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.networks(x), y)

    def note(self, value: Tensor) -> None:
        self.seen.append(value.detach().clone())

    def update(self) -> None:
        """Record gradients and weights, and update the parts that have gradients."""
        for part, optimizer in zip(self.networks.children(), self._optimizers, strict=True):
            if any(parameter.grad is not None for parameter in part.parameters()):
                self.seen += [parameter.grad.clone() for parameter in part.parameters()]
                optimizer.step()
                optimizer.zero_grad()
                self.seen += [parameter.detach().clone() for parameter in part.parameters()]


def micro_batches(loop: Loop) -> None:
    for x, y in loop.micro_batches():
        loop.loss(x, y).backward()
    loop.update()


def micro_batches_of_different_sizes(loop: Loop) -> None:
    for x, y in zip(loop.x.split([6, 5, 1]), loop.y.split([6, 5, 1]), strict=True):
        loop.loss(x, y).backward()
    loop.update()


def two_steps(loop: Loop) -> None:
    for x, y in zip(loop.x.chunk(2), loop.y.chunk(2), strict=True):
        loop.loss(x, y).backward()
        loop.update()


def forwards_then_backwards(loop: Loop) -> None:
    for loss in [loop.loss(x, y) for x, y in loop.micro_batches()]:
        loss.backward()
    loop.update()


def forwards_then_backwards_in_reverse(loop: Loop) -> None:
    losses = [loop.loss(x, y) for x, y in loop.micro_batches()]
    while losses:
        losses.pop().backward()
    loop.update()


def pipeline(loop: Loop) -> None:
    """Run each forward before the backward of the previous forward."""
    losses: list[Tensor] = []
    for x, y in loop.micro_batches():
        losses.append(loop.loss(x, y))
        if len(losses) == 2:
            losses.pop(0).backward()
    losses.pop().backward()
    loop.update()


def skipped_losses(loop: Loop) -> None:
    """Skip the backward of one loss, another in each step, as loss scalers and guards against NaN do."""
    for index, (x, y) in enumerate(loop.micro_batches()):
        loss = loop.loss(x, y)
        if index != loop.step % 5:
            loss.backward()
    loop.update()


def generator_and_critic(loop: Loop) -> None:
    generate, judge = loop.networks.classifier, loop.networks.critic
    fake = generate(loop.x)
    (softplus(judge(fake.detach())).mean() + softplus(-judge(torch.randn(BATCH, CLASSES))).mean()).backward()
    loop.update()
    generator_loss = softplus(-judge(fake)).mean()
    generator_loss.backward(inputs=list(generate.parameters()))
    loop.update()
    loop.note(generator_loss)


def critic_with_penalty(loop: Loop) -> None:
    judge = loop.networks.critic
    for logits in loop.networks(loop.x).detach().chunk(2):
        logits.requires_grad_()
        score = judge(logits).sum()
        (slope,) = torch.autograd.grad(score, logits, create_graph=True)
        (score + (slope.norm(dim=1) - 1).square().mean()).backward()
    loop.update()


def metric_after_backward(loop: Loop) -> None:
    logits = loop.networks(loop.x)
    cross_entropy(logits, loop.y).backward()
    loop.note(logits.softmax(-1).max(-1).values.mean())
    loop.note((logits * logits.log_softmax(-1)).sum())
    loop.update()


def evaluation_with_gradients_on(loop: Loop) -> None:
    loop.loss(loop.x, loop.y).backward()
    loop.update()
    loop.networks.eval()
    loop.note(loop.loss(loop.x[:4], loop.y[:4]))
    loop.networks.train()


def evaluation_first(loop: Loop) -> None:
    with torch.no_grad():
        loop.note(loop.loss(loop.x, loop.y))
    loop.note(loop.loss(loop.x[:2], loop.y[:2]))
    loop.loss(loop.x, loop.y).backward()
    loop.update()


def gradient_then_another_loss(loop: Loop) -> None:
    logits = loop.networks(loop.x)
    weight = loop.networks.classifier[0].up.weight
    (slope,) = torch.autograd.grad(cross_entropy(logits, loop.y), [weight], retain_graph=True)
    loop.note(logits.sigmoid().mean() + slope.square().mean())
    cross_entropy(logits, loop.y.flip(0)).backward(retain_graph=True)
    logits.square().mean().backward()
    loop.update()


def two_heads(loop: Loop) -> None:
    """Run backward of one loss, and then of another that shares half of the graph."""
    logits = loop.networks(loop.x)
    cross_entropy(logits, loop.y).backward(retain_graph=True)
    loop.networks.critic(logits).mean().backward()
    loop.update()


def policy_epochs(loop: Loop) -> None:
    """Take several epochs over one policy's actions, as PPO, with the policy's distance after each."""
    log_policy = lambda x, y: loop.networks(x).log_softmax(-1).gather(1, y[:, None]).squeeze(1)  # noqa: E731
    with torch.no_grad():
        old = log_policy(loop.x, loop.y)
        advantage = torch.randn(BATCH)
    for _ in range(2):
        for rows in torch.arange(BATCH).chunk(2):
            ratio = (log_policy(loop.x[rows], loop.y[rows]) - old[rows]).exp()
            gain = torch.minimum(ratio * advantage[rows], ratio.clamp(0.9, 1.1) * advantage[rows])
            (-gain.mean()).backward()
            loop.update()
            loop.note((ratio - 1 - ratio.log()).mean())


def losses_are_logged(loop: Loop) -> None:
    """Keep logged losses with their graphs, a common mistake, so that the graphs outlive the step."""
    loss = loop.loss(loop.x, loop.y)
    loss.backward()
    unused = loop.loss(loop.x, loop.y)
    loop.update()
    loop.left_over = [loss, unused, *loop.left_over[:3]]


def backward_in_the_next_step(loop: Loop) -> None:
    """Run the backwards of two steps in every second step."""
    loop.left_over.append(loop.loss(loop.x, loop.y))
    if loop.step % 2:
        for loss in loop.left_over:
            loss.backward()
        loop.left_over.clear()
        loop.update()


PATTERNS: dict[str, Callable[[Loop], None]] = {
    pattern.__name__: pattern
    for pattern in (
        micro_batches, micro_batches_of_different_sizes, two_steps, forwards_then_backwards,
        forwards_then_backwards_in_reverse, pipeline, skipped_losses, generator_and_critic, critic_with_penalty,
        metric_after_backward, evaluation_with_gradients_on, evaluation_first, gradient_then_another_loss, two_heads,
        policy_epochs, losses_are_logged, backward_in_the_next_step,
    )
}  # fmt: skip


def make_networks() -> Networks:
    torch.manual_seed(0)
    return Networks()


def run(pattern: str, networks: Networks, offloader: ActivationOffloader | None = None, known: bool = True) -> Loop:
    loop = Loop(networks)
    for step in range(NUM_STEPS):
        loop.begin(step)
        model = networks if known else None
        with offloader.offload_context(model) if offloader else nullcontext():
            PATTERNS[pattern](loop)
    loop.left_over.clear()
    gc.collect()
    return loop


def check(pattern: str, offloader: ActivationOffloader, known: bool = True) -> None:
    networks = make_networks()
    want = run(pattern, copy.deepcopy(networks)).seen
    seen = run(pattern, networks, offloader, known).seen
    assert len(seen) == len(want) > 0
    different = [index for index, pair in enumerate(zip(seen, want, strict=True)) if not torch.equal(*pair)]
    assert not different
    assert offloader.stats.host_bytes_live == 0


@pytest.mark.sweep(share=0.1)
@pytest.mark.parametrize("copier", CHOSEN_COPIERS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_mode_all(pattern: str, copier: str) -> None:
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=COPIERS[copier]())
    check(pattern, offloader)
    assert offloader.stats.bytes_moved > 0


@pytest.mark.sweep(share=0.1)
@pytest.mark.parametrize("copier", CHOSEN_COPIERS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_plan(pattern: str, copier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = RandomPlanner(random.Random(f"{pattern} {copier}"))
    monkeypatch.setattr(plan_maker, "make_plan", planner)
    check(pattern, ActivationOffloader(mode="auto", offload_threshold_mb=0, copier=COPIERS[copier]()))
    assert planner.num_plans > 0


@pytest.mark.sweep(share=0.2)
@pytest.mark.parametrize(("index", "pattern"), list(enumerate(PATTERNS)))
def test_the_planners_plan(index: int, pattern: str) -> None:
    """Check the planner's smallest plan, with and without the model's weights known beforehand."""
    options: dict[str, Any] = {"mode": "auto", "offload_threshold_mb": 0, "max_slowdown": 100.0}
    copier = COPIERS[CHOSEN_COPIERS[index % len(CHOSEN_COPIERS)]]()
    check(pattern, ActivationOffloader(**options, copier=copier), known=index // 2 % 2 == 0)
