"""What a window of micro-batches is: how a batch is split, what each part counts, and how ranks share it."""
