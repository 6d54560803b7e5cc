"""Landscapes in two styles, for recipes that are given no images.

- `draw`: landscapes, painted or in ink.
- `autoencoder`: images to latents and back.
- `prepare`: trains the autoencoder and writes it beside the latents of each style, for `train_lgt`.
"""
