"""Files that are whole or absent, and one writer at a time. Read in this order:

- `files_on_disk`: writes a file so that a reader sees all of it or none, names a full disk, and hashes files.
- `locks`: one process at a time writes a folder, signed with host, process and time.
"""
