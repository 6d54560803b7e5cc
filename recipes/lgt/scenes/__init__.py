"""Latents of landscapes in two styles, for `train_lgt` where there are no others.

- `autoencoder`: images to latents and back.
- `prepare`: trains the autoencoder and writes it beside the latents of each style.
"""
