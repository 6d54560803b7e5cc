"""The homes of a teacher's weights between and during its visits to the device, one strategy a module."""
