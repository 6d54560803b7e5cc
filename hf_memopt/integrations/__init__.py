"""Adapters to the libraries that hf_memopt extends, a package or a module each."""
