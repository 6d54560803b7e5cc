"""Parts of `train_lgt`, style transfer in a latent space through a 10-step ODE, in the order to read them.

- `options`: its configuration, from a file and flags.
- `data`: latents, and the batches that are drawn from them.
- `model`: the U-Net and the integration of its velocities.
- `losses`: style and content.
- `step`: the loss of a batch, and one update, of the mean gradient or of the whole window's.
- `evaluation`: translation, distances and pictures.
- `report`: the closing checklist and results.
- `plan`: the update on fake tensors.
"""
