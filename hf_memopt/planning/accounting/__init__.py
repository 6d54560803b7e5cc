"""The allocations of a simulated step, and their use."""
