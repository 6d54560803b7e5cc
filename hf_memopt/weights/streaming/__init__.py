"""The parts of streaming weights: read in this order.

- `access_trace`: which weights a module reads, and when.
- `copy_schedule`: which weights travel together, and in what order.
- `ring`: the device memory that they pass through.
"""
