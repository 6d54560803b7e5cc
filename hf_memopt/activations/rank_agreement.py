"""What the ranks of a run decide together."""

import torch
import torch.distributed as dist

from hf_memopt.activations.planner.offload_plan import InfeasibleBudgetError


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
    needed_bytes = 0 if error is None else error.smallest_bytes
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        if error is not None:
            raise error
        return is_decided
    backend = dist.get_backend()
    device = "cpu" if "gloo" in backend else torch.accelerator.current_accelerator()
    demand = torch.tensor([needed_bytes, int(is_decided)], device=device)
    dist.all_reduce(demand, dist.ReduceOp.MAX)
    largest_bytes, decided = demand.tolist()
    if largest_bytes:
        raise InfeasibleBudgetError(budget_bytes, largest_bytes)
    return bool(decided)
