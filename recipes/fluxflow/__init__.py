"""Parts of `train_fluxflow`, a VAE-GAN, in the order to read them.

- `options`: its flags.
- `data`: images in buckets of one shape each.
- `model`: the VAE, the discriminator and LPIPS.
- `losses`: of their training.
- `step`: one update of the discriminator and one of the VAE.
- `levers`: the allocator's segments, the average of weights, several processes.
- `report`: results and panels.
- `plan`: the step on fake tensors.
"""
