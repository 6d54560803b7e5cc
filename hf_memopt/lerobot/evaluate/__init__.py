"""Measurements of a student with few Euler steps."""
