"""Decides which saved storages to keep, to offload and to recompute. Plain Python: nothing here imports torch."""
