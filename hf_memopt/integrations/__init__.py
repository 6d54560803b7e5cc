"""Adapters to the libraries that hf_memopt extends, one package each."""
