"""Files that are whole or absent, and one writer at a time. Read in this order:

- `files_on_disk`: writes a file so that a reader sees all of it or none, and names a full disk.
- `digests`: SHA-256 of files and weights.
- `locks`: one process at a time writes a folder.
"""
