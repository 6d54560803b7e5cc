"""What the ranks of a run decide together."""

from hf_memopt.activations.planner.offload_plan import InfeasibleBudgetError
from hf_memopt.memory.ranks import gather_from_ranks


def raise_on_all_ranks(error: InfeasibleBudgetError | None, budget_bytes: int, is_decided: bool) -> bool:
    """Raise on every rank, with the largest demand among them, if the budget is too small on one.

    Every rank has to call this as often as the others, whatever it found: each time before a pass of the same model,
    until it returns True.

    Args:
        error: what this rank's plan says.
        budget_bytes: what all of them were given.
        is_decided: whether this rank has a plan.

    Returns:
        Whether any rank has decided, which lets all of them go on.
    """
    demands = gather_from_ranks((0 if error is None else error.smallest_bytes, is_decided))
    largest_bytes = max(needed_bytes for needed_bytes, _ in demands)
    if error is not None and error.smallest_bytes == largest_bytes:
        raise error
    if largest_bytes:
        raise InfeasibleBudgetError(budget_bytes, largest_bytes)
    return any(decided for _, decided in demands)
