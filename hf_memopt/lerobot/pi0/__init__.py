"""Policy types `pi0_reflow` and `pi05_reflow` for lerobot's commands, which find the modules by their names."""
