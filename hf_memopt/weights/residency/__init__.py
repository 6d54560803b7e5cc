"""Storages of frozen weights that have memory only while something reads them; see `hf_memopt.weights.base`."""
