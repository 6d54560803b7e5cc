"""Storages of frozen weights that have memory only while something reads them; README.md of `weights` says how."""
