"""Students and checkpoints: prepared, exported, described and diagnosed."""
