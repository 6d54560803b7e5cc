"""Parts of `train_neural_operator`, in the order to read them.

- `options`: its flags.
- `darcy`: coefficient fields and their solutions, as files.
- `data`: these files, or neuralop's, as datasets.
- `model`: neuralop's models, and checkpointed parts.
- `step`: the optimizer, one update in micro-batches, and errors by resolution.
- `trainer`: the same training by neuralop's Trainer; `report`: results and panels; `plan`: the update on fake tensors.
"""
