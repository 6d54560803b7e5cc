"""Ways to train adapters of a frozen base that the benchmark compares."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    is_copied: bool = False  # weights are copied out of the files' mapping into memory
    is_checkpointed: bool = False  # activations are computed again in backward
    is_streamed: bool = False  # `StreamedWeights` reads the weights from the files
    has_budget: bool = False  # and keeps as many of them as its budget has room for


NO_LIMIT = "in memory, no limit"
KINDS = {
    NO_LIMIT: Kind(is_copied=True),
    "in memory": Kind(is_copied=True),
    "mapped": Kind(),
    "mapped, checkpointing": Kind(is_checkpointed=True),
    "ours": Kind(is_streamed=True),
    "ours, checkpointing": Kind(is_checkpointed=True, is_streamed=True),
    "ours, checkpointing, budget": Kind(is_checkpointed=True, is_streamed=True, has_budget=True),
}
