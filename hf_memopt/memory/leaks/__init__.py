"""Finds memory that stays behind at every training step. Read in this order:

- `live_storages`: every tensor storage that Python or an autograd graph holds.
- `storage_ages`: since which step each of them is alive.
- `referrers`: who references an object, as a Python expression.
- `leak_report`: tensors that stay behind and their holders, in words.
- `detect`: `detect_leaks` and `LeakMonitor`.
"""
