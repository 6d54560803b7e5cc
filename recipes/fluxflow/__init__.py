"""Parts of `train_fluxflow`, a VAE-GAN."""
