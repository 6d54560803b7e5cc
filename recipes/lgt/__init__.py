"""Parts of `train_lgt`, style transfer in a latent space through a 10-step ODE."""
