"""Finds memory that stays behind at every training step."""
