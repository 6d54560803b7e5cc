"""How good a student is with few Euler steps."""
