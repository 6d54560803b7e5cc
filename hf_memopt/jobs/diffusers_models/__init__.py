"""Models of diffusers that denoise, trained as its example scripts train them."""
