"""The shared parts of all recipes. Read them after one script."""
