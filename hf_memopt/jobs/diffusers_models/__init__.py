"""Models of diffusers that denoise, trained as its example scripts train them. Read in this order:

- `denoiser_config`: finds and reads configurations, and builds models from them.
- `denoiser_families`: inputs of each class beside latents, and which of its layers the scripts adapt.
- `denoising`: the task: batches of latents and text embeddings, and the loss.
"""
