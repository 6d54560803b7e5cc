"""Names of FSDP2's collectives: torch 2.15 has new ones, and keeps the old as aliases."""

from torch import distributed

ALL_GATHERS = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(distributed, name)]
REDUCE_SCATTERS = [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(distributed, name)]
