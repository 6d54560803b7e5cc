"""Saved storages that backward computes again instead of holding them. Read in this order:

- `plain_dispatch`: calls an operation inside a dispatch mode as it is called outside of all modes.
- `op_tracer`: notes which operation made which tensor during the forward pass.
- `tracing_scope`: where operations are noted.
- `replay`: resolves a storage into operations and performs them again.
"""
