"""Policy type `pi0_reflow` for lerobot's commands, which find the modules by their names."""
