"""The parts of streaming weights: which weights are read when, and the device memory that they pass through."""
