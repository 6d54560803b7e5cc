"""The first of several ranks, simulated: `first_rank` for all engines, `zero_engine` for DeepSpeed's own questions."""
