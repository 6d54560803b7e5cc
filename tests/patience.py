"""The limit of tests' waits for other processes."""

# For hangs, not for slow steps: importing lerobot alone takes minutes where processes share two cores.
HANG_S = 1800
