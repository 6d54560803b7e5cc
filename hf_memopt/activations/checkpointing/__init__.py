"""Selective activation checkpointing: cheap operations are recomputed, the results of expensive ones kept."""
