"""Saved storages that backward computes again instead of holding them."""
