"""Cards, their speeds, and the memory below them."""
