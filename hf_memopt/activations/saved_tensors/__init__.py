"""Saved storages on one device: kept, or copied to a memory below it and back."""
