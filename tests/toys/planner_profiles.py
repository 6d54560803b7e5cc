"""Profiles of saved tensors and memories below the device, on which plans are compared."""

import random
from collections.abc import Sequence
from dataclasses import replace

from hf_memopt.activations.planner.profile import Profile, SavedStorage
from hf_memopt.transfer.tier import Tier

Tiers = tuple[Tier, ...]

# A decoder layer in bfloat16, run eagerly, hidden size 4096: bytes per token in units of 1024, which storage of the
# layer it is made from, and how: nothing if it cannot be made again, "read" for an elementwise kernel, else the
# multiplications per token.
_DECODER_LAYER: Sequence[tuple[int, int | None, str | int | None]] = (
    (8, None, None),  # input
    (16, 0, "read"),  # cast
    (8, 1, "read"),  # norm
    (8, 2, "read"),  # scaled
    (16, 3, 4096 * 4096),  # queries
    (8, 4, "read"),
    (4, 3, 4096 * 1024),  # keys
    (2, 6, "read"),
    (8, 5, "read"),  # rotated
    (2, 7, "read"),
    (2, 3, 4096 * 1024),  # values
    (8, None, None),  # attention
    (16, 11, "read"),
    (8, 12, "read"),
    (8, 13, "read"),
    (24, 14, 4096 * 12288),  # gate
    (24, 14, 4096 * 12288),  # up
    (24, 15, "read"),  # silu
    (24, 17, "read"),  # product
)


def chain(sizes: Sequence[int], *, forward_s: float = 1.0, backward_s: float = 2.0) -> Profile:
    """Save at even intervals and use in reverse; nothing can be recomputed."""
    last = len(sizes)
    storages = [
        SavedStorage(size, forward_s * index / last, (forward_s + backward_s * (last - index) / last,))
        for index, size in enumerate(sizes)
    ]
    return Profile(tuple(storages), forward_s + backward_s)


def decoder(num_layers: int, kinds: int) -> Profile:
    """Stack equal layers on an input that cannot be recomputed; other storages are cheap or dear to recompute."""
    num_storages = num_layers * kinds
    storages = []
    for index in range(num_storages):
        kind = index % kinds
        used_at = 3.0 - 2.0 * index / num_storages
        num_bytes = 2**20 * (1, 2, 3)[kind % 3]
        recompute_s = None if kind == 0 else num_bytes / 2**20 * (0.01, 0.3)[kind % 2] / num_storages
        sources = () if kind == 0 else (index - 1,)
        storages.append(SavedStorage(num_bytes, index / num_storages, (used_at,), recompute_s, sources))
    return Profile(tuple(storages), 3.0)


def language_model(
    num_layers: int, num_tokens: int, *, flops: float = 5e14, memory_bytes_per_s: float = 3.5e12
) -> Profile:
    """Take a decoder of 8 billion parameters on a large GPU, and logits of 32,000 classes in float32, twice."""
    flops, memory_bytes_per_s = 5e14, 3.5e12
    num_kinds = len(_DECODER_LAYER)
    layer_s = 2 * num_tokens * (193_000_000 + 4096 * num_tokens) / flops
    storages = []
    for layer in range(num_layers):
        for kind, (kib_per_token, source, made_by) in enumerate(_DECODER_LAYER):
            part = kind / num_kinds
            num_bytes = 1024 * kib_per_token * num_tokens
            used_at = layer_s * (3 * num_layers - 2 * (layer + part))
            seconds: float | None = None
            if made_by == "read":
                seconds = 3 * num_bytes / memory_bytes_per_s
            elif isinstance(made_by, int):
                seconds = 2 * made_by * num_tokens / flops
            sources = () if seconds is None or source is None else (layer * num_kinds + source,)
            storages.append(SavedStorage(num_bytes, layer_s * (layer + part), (used_at,), seconds, sources))
    end = layer_s * num_layers
    for _ in range(2):
        storages.append(SavedStorage(4 * 32_000 * num_tokens, end, (end,)))
    return Profile(tuple(storages), 3 * end)


def convolutions(num_blocks: int) -> Profile:
    """Halve sizes at each fifth of the network; activation functions can be recomputed from their inputs."""
    storages: list[SavedStorage] = []
    for block in range(num_blocks):
        num_bytes = 2 ** (24 - 5 * block // num_blocks)
        start, end = block / num_blocks, 3 - 2 * (block + 1) / num_blocks
        convolved = len(storages)
        storages.append(SavedStorage(num_bytes, start + 0.6 / num_blocks, (end + 0.8 / num_blocks,)))
        used = (end + 0.4 / num_blocks, end + 2 / num_blocks)
        storages.append(SavedStorage(num_bytes, start + 0.8 / num_blocks, used, num_bytes / 2**34, (convolved,)))
    return Profile(tuple(storages), 3.0)


def u_net(num_levels: int) -> Profile:
    """Go down and up again; each level waits for its counterpart, and half can be recomputed."""
    levels = [*range(num_levels), *reversed(range(num_levels))]
    storages = []
    for index, level in enumerate(levels):
        for part in range(4):
            time = (index + part / 4) / len(levels)
            recompute_s = 2**-level / 300 if part % 2 else None
            sources = (len(storages) - 1,) if part % 2 else ()
            storages.append(SavedStorage(2 ** (22 - level), time, (3 - 2 * time,), recompute_s, sources))
    return Profile(tuple(storages), 3.0)


def at_random(seed: int, num_storages: int) -> tuple[Profile, Tiers, int]:
    """Return a network-like profile, some of it recomputable, host memory, and how far to prefetch ahead."""
    rng = random.Random(f"{seed}/{num_storages}")
    forward_s, backward_s = rng.uniform(0.5, 2), rng.uniform(0.5, 3)
    saves = sorted(rng.uniform(0, forward_s) for _ in range(num_storages))
    storages: list[SavedStorage] = []
    first_use = forward_s + backward_s
    for index, saved_at in enumerate(saves):
        shares_node = index > 0 and rng.random() < 0.25
        mirrored = forward_s + backward_s * (1 - saved_at / forward_s) * rng.uniform(0.9, 1)
        first_use = first_use if shares_node else mirrored
        uses: tuple[float, ...] = (first_use,)
        if rng.random() < 0.3:
            uses = (first_use, min(forward_s + backward_s, first_use + rng.uniform(0, 0.3)))
        if rng.random() < 0.12:
            uses = ()
        num_bytes = 1000 * rng.choice([1, 4, 8, 8, 16, rng.randint(1, 40)])
        recompute_s, sources = None, ()
        if rng.random() < 0.7:
            recompute_s = rng.choice([1e-3, 1e-2, 0.05, 0.2]) * num_bytes / 8000
            sources = tuple(rng.sample(range(index), min(index, rng.choice([0, 1, 1, 2]))))
        storages.append(SavedStorage(num_bytes, saved_at, uses, recompute_s, sources))
    bandwidth = 10 ** rng.uniform(3.3, 6)
    tiers = host(bandwidth, bandwidth * rng.choice([0.5, 1, 2]))
    return Profile(tuple(storages), forward_s + backward_s), tiers, rng.choice([0, 1, 2, 3])


def host(write_bytes_per_s: float, read_bytes_per_s: float, budget_bytes: int | None = None) -> Tiers:
    """Return host memory alone."""
    return (Tier("host", write_bytes_per_s, read_bytes_per_s, budget_bytes),)


def limited(tiers: Tiers, host_bytes: int) -> Tiers:
    """Return host memory with a budget."""
    return (replace(tiers[0], budget_bytes=host_bytes),)


def with_disk(tiers: Tiers, share: float, host_bytes: int | None, disk_bytes: int | None = None) -> Tiers:
    """Return host memory and a disk below it, which has a `share` of its speed, with budgets."""
    disk = replace(tiers[0].slower(share), name="disk", budget_bytes=disk_bytes, wears=True)
    return replace(tiers[0], budget_bytes=host_bytes), disk


def host_for(profile: Profile, share: float) -> Tiers:
    """Return host memory that takes `share` of all saved bytes during the profile's forward, and as fast back."""
    forward_s = max(storage.saved_at_s for storage in profile.storages)
    bandwidth = share * sum(profile.sizes) / forward_s
    return host(bandwidth, bandwidth)
