"""The processes that train together, with or without torch.distributed."""

from torch import distributed


def num_ranks() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank_among_several() -> int | None:
    """Return this process's rank, or None where it trains alone."""
    return distributed.get_rank() if num_ranks() > 1 else None


def gather_from_ranks[T](value: T) -> list[T]:
    """Return every rank's value, in the order of ranks, which have to call this together."""
    values = [value] * num_ranks()
    if len(values) > 1:
        distributed.all_gather_object(values, value)
    return values
