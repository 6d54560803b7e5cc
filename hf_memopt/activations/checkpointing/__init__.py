"""Selective activation checkpointing: recompute cheap operations, keep what the expensive ones gave.

Read in this order:

- `save_policies`: which results are kept, operation by operation.
- `selective`: applies a policy to a function or to a model's blocks.
"""
