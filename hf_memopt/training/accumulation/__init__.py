"""A window of micro-batches: how a batch is split, the weight of each part, and how ranks share it."""
