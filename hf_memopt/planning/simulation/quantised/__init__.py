"""Weights and states that bitsandbytes and torchao keep in few bits: bytes for estimates."""
