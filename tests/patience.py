"""How long tests wait for other processes."""

# For what hangs, and not for what is slow: importing lerobot alone takes minutes where many processes share two cores.
HANG_S = 1800
