"""Saved storages on one device: kept, or copied to the host and back."""
