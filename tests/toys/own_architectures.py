"""Tiny recurrent, graph, reinforcement-learning and adversarial models that no library brings.

They save memory that several version counters count, sparse operands, many small operations, several passes through
one module, and values that are cut out of the graph.
"""

from collections.abc import Callable

import torch
from architectures import BATCH, TOKENS, VOCABULARY, Architecture, Workload, to_random_target, token_ids
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WIDTH = 16
OWN_ARCHITECTURES: dict[str, Architecture] = {}


def architecture(family: str) -> Callable[[Callable[[], Workload]], Callable[[], Workload]]:
    """Register the decorated function's workload under its name."""

    def register(make: Callable[[], Workload]) -> Callable[[], Workload]:
        OWN_ARCHITECTURES[make.__name__] = Architecture(make.__name__, family, make, can_checkpoint=False)
        return make

    return register


# ----------------------------------------------------------------------------------------------- recurrent


class Tagger(nn.Module):
    """A recurrent layer's token for each token, `(tokens, batch)` to `(tokens, batch, vocabulary)`."""

    def __init__(self, recurrent: nn.Module, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = recurrent
        self.head = nn.Linear(size, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(ids))[0])


def tagging(recurrent: nn.Module, size: int) -> Workload:
    tagger, ids = Tagger(recurrent, size), token_ids().T
    return Workload(tagger, lambda: cross_entropy(tagger(ids).flatten(0, 1).float(), ids.flatten()))


@architecture("recurrent")
def gru() -> Workload:
    return tagging(nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.2), WIDTH)


@architecture("recurrent")
def lstm_with_projections() -> Workload:
    return tagging(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, proj_size=8, bidirectional=True), 16)


class InFloat32(nn.Module):
    """A wrapper for a layer without a bfloat16 kernel on some CPUs outside of autocast."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float())


@architecture("recurrent")
def lstm() -> Workload:
    return tagging(InFloat32(nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2)), WIDTH)


class Packed(nn.Module):
    """A layer over sequences of different lengths, `(tokens, batch, width)`."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        lengths = torch.tensor([TOKENS - 5 * index for index in range(BATCH)])
        return pad_packed_sequence(self.recurrent(pack_padded_sequence(x, lengths))[0])


@architecture("recurrent")
def packed_gru() -> Workload:
    return tagging(Packed(nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.2)), WIDTH)


class Cells(nn.Module):
    """An LSTM and a GRU cell, one above the other and step by step; the state is cut off halfway."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        hidden = state = top = x.new_zeros(x.shape[1], WIDTH)
        tops = []
        for index, step in enumerate(x):
            if index == len(x) // 2:
                hidden, state, top = hidden.detach(), state.detach(), top.detach()
            hidden, state = self.below(step, (hidden, state))
            top = self.above(hidden, top)
            tops.append(top)
        return (torch.stack(tops),)


@architecture("recurrent")
def cells() -> Workload:
    return tagging(Cells(), WIDTH)


class Gates(nn.Module):
    """An LSTM that saves memory by one storage for all gates, each with a version counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        hidden = state = x.new_zeros(x.shape[1], WIDTH)
        states = []
        for step in x:
            ingate, forget, cell, out = self.gates(torch.cat([step, hidden], -1)).unsafe_chunk(4, -1)
            state = forget.sigmoid_() * state + ingate.sigmoid_() * cell.tanh_()
            hidden = out.sigmoid_() * state.tanh()
            states.append(hidden)
        return (torch.stack(states),)


@architecture("recurrent")
def gates_in_place() -> Workload:
    return tagging(Gates(), WIDTH)


# --------------------------------------------------------------------------------------------------- graphs

NODES, EDGES = 24, 80


def random_edges() -> Tensor:
    """Return where each edge comes from and goes, `(2, EDGES)`."""
    return torch.randint(NODES, (2, EDGES))


class Convolutions(nn.Module):
    """Two layers of a graph convolution, `(nodes, width)`; the adjacency is a sparse buffer."""

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            with torch.autocast("cpu", enabled=False):  # CSR products have no kernel for bfloat16
                x = torch.sparse.mm(self.adjacency, x.float())
            x = torch.nn.functional.gelu(layer(x))
        return x


def graph_convolutions(to_layout: Callable[[Tensor], Tensor]) -> Workload:
    adjacency = torch.sparse_coo_tensor(
        random_edges(), torch.rand(EDGES), (NODES, NODES), check_invariants=True
    ).coalesce()
    model, features = Convolutions(to_layout(adjacency)), torch.randn(NODES, WIDTH)
    return Workload(model, to_random_target(lambda: model(features)))


@architecture("graph")
def graph_convolutions_coo() -> Workload:
    return graph_convolutions(lambda adjacency: adjacency)


@architecture("graph")
def graph_convolutions_csr() -> Workload:
    return graph_convolutions(Tensor.to_sparse_csr)


class MessagePassing(nn.Module):
    """Nodes that gather messages along edges by attention and by sum, and take them in with a GRU cell."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges)
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.score = nn.Linear(WIDTH, 1)
        self.update = nn.GRUCell(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges
        for _ in range(3):
            messages = self.message(torch.cat([x[source], x.index_select(0, target)], -1)).float()
            scores = self.score(messages).float().squeeze(-1)
            largest = scores.new_zeros(NODES).scatter_reduce(0, target, scores.detach(), "amax", include_self=False)
            weights = (scores - largest[target]).exp()
            total = weights.new_zeros(NODES).scatter_add(0, target, weights)
            attended = (weights / total.gather(0, target))[:, None] * messages
            received = [x.new_zeros(NODES, WIDTH).float().index_add(0, target, each) for each in (attended, messages)]
            x = self.update(torch.cat(received, -1), x).float()
        return x


@architecture("graph")
def message_passing() -> Workload:
    model, features = MessagePassing(random_edges()), torch.randn(NODES, WIDTH)
    return Workload(model, to_random_target(lambda: model(features)))


# ------------------------------------------------------------------- reinforcement learning, adversarial training


class ActorCritic(nn.Module):
    """A policy over `ACTIONS` and a value, from one trunk."""

    ACTIONS = 5

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, self.ACTIONS), nn.Linear(32, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(observation)
        return self.actor(hidden).float(), self.critic(hidden).float().squeeze(-1)


@architecture("reinforcement")
def actor_critic() -> Workload:
    """Return PPO's loss: the old policy and the advantage are cut out of graphs of the same networks."""
    model = ActorCritic()
    observations, rewards = torch.randn(2, 32, WIDTH), torch.randn(32)
    actions, drift = torch.randint(ActorCritic.ACTIONS, (32,)), 0.1 * torch.randn(32)

    def log_probability(logits: Tensor) -> Tensor:
        return torch.distributions.Categorical(logits=logits, validate_args=False).log_prob(actions)

    def loss() -> Tensor:
        old_logits, _ = model(observations[0])
        _, next_value = model(observations[1])
        logits, value = model(observations[0])
        target = rewards + 0.9 * next_value.detach()
        advantage = (target - value).detach()
        ratio = (log_probability(logits) - log_probability(old_logits).detach() - drift).exp()
        policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        return policy_loss + 0.5 * (target - value).square().mean() - 0.01 * entropy

    return Workload(model, loss)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(WIDTH, 8 * 4 * 4), nn.Unflatten(1, (8, 4, 4)), nn.ConvTranspose2d(8, 8, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Dropout2d(0.2), nn.Conv2d(8, 8, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True), nn.Flatten(), nn.Linear(8 * 4 * 4, 1),
        )  # fmt: skip


@architecture("adversarial")
def gan() -> Workload:
    """Take both losses in one pass; `test_loop_patterns.py` has a backward for each."""
    model = Adversaries()
    real, noise = torch.randn(4, 3, 16, 16), torch.randn(4, WIDTH)

    def loss() -> Tensor:
        fake = model.generator(noise)
        judge = model.discriminator
        of_discriminator = softplus(judge(fake.detach()).float()).mean() + softplus(-judge(real).float()).mean()
        return of_discriminator + softplus(-judge(fake).float()).mean()

    return Workload(model, loss)
