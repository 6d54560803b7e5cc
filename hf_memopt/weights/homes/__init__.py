"""The bytes of weights that are away, in host memory or in files, and how they are packed."""
