"""Searches for the fastest settings that fit a card."""
