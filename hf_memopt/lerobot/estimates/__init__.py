"""Estimates and plans of lerobot's own training of a policy, which `hf-memopt estimate` and `plan` find by name."""
