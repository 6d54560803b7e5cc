"""Checkpoints of lerobot: policies, adapters, and the processors of their data."""
