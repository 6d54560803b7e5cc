"""Workloads: the trainers of models and of files of arguments, and lerobot's training of policies."""
