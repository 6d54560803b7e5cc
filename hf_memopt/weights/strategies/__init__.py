"""Where a teacher's weights are between and during its visits to the device, one strategy a module."""
