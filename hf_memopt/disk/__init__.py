"""Files that are whole or absent, and one writer at a time."""
