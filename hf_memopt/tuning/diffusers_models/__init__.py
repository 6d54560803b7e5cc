"""What belongs to models of diffusers that denoise, trained as its example scripts train them. Read in this order:

- `denoiser_config`: finds and reads configurations, and builds models from them.
- `denoiser_families`: what each class takes beside latents, and which of its layers the scripts adapt.
- `denoising`: the task: batches of latents and text embeddings, and the loss.
"""
